"""A process that has imported torch and forks the worlds of a run.

Run as `... .fork_server PARENT SOCKET MODULE...`.

Supervisors, and what they run of ours, are forked from it, attempt by attempt: torch is imported once. No code of a
user's is imported here, so what an attempt runs is what the files say when it begins.
"""

import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from midstride.engine.processes.forked_program import ForkedProgram, end_with
from midstride.engine.processes.lifetime import SESSION, die_with_parent, is_suspended
from midstride.engine.processes.preload import preload
from midstride.engine.processes.proc_entry import show_command, show_variable
from midstride.engine.processes.supervisor import Supervisor

__all__ = ["ForkServer", "ForkedSupervisor", "ForkingSupervisor", "forking", "running_server"]

log = logging.getLogger(__name__)

_SESSION_BYTES = 256
_STOPPED_S = 2.0  # between looks whether a server that does not answer is stopped
_REQUEST_BYTES = 1 << 17
_POLL_S = 0.5  # between checks whether a process has ended, while waiting without a limit
#: prefixes of variables that Python, torch or their libraries read as they start: a fork keeps the values of its server
_READ_EARLY = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "ATEN_", "LD_", "MALLOC_")
#: of these, variables that are read later, or that the fork applies
_READ_LATE = {"OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}

_servers: list["ForkServer"] = []
_servers_lock = threading.Lock()


@contextmanager
def forking(environment: Mapping[str, str], *modules: str) -> Iterator[None]:
    """Start a fork server: supervised processes are forked from it until the block ends.

    Blocks in several threads share a server, which ends with the last of them.

    Args:
        environment: of the server.
        modules: our modules that it imports at once. A command `python -m MODULE` runs in a fork if it is one of them.
    """
    if sys.platform != "linux":  # only there is a fork found and ended as a process of its own
        yield
        return
    with _servers_lock:
        fits = (one for one in _servers if one.suits(environment) and one.modules >= {*modules})
        if (server := next(fits, None)) is None:
            _servers.append(server := ForkServer(environment, modules))
        server.blocks += 1
    try:
        yield
    finally:
        with _servers_lock:
            server.blocks -= 1
            is_last = not server.blocks
            if is_last:
                _servers.remove(server)
        if is_last:
            server.close()


def running_server(environment: Mapping[str, str]) -> "ForkServer | None":
    """Return a running server with forks like processes started in `environment`, or None."""
    return next((server for server in reversed(_servers) if server.suits(environment)), None)


class ForkServer:
    """Client of a fork server: starts it and asks for supervisors. Closing ends all forks.

    Args:
        environment: of the server.
        modules: that the server imports.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.modules = frozenset(modules)
        #: how many blocks of `forking` use it
        self.blocks = 0
        self._early = _early(environment)
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(its_end.fileno()), *modules]

        def start() -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                command,
                env={**environment, SESSION: " " * _SESSION_BYTES},
                pass_fds=[its_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

        with its_end:
            self._parent = _ParentThread(start)
            self._process = self._parent.process

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether the server runs, and its forks are like processes started in `environment`."""
        return self._process.poll() is None and self._early == _early(environment)

    def start_supervisor(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float
    ) -> "ForkedSupervisor | None":
        """Return a supervisor as `supervised_process.start_supervisor` does.

        Returns None if the server has ended, or if the request, mostly the environment, is too long for a message.
        """
        request = {
            "command": [*command],
            "environment": dict(environment),
            "log": str(log.resolve()),
            "grace_s": grace_s,
            "folder": str(Path.cwd()),
        }
        data = json.dumps(request).encode()
        if len(data) > _REQUEST_BYTES or len(environment.get(SESSION, "").encode()) > _SESSION_BYTES:
            return None
        try:
            with self._lock:
                self._socket.send(data)
                while "started" not in (answer := self._receive()):
                    self._codes[answer["ended"]] = answer["code"]
                self._codes.pop(answer["started"], None)  # of an earlier process with this number
            return ForkedSupervisor(self, answer["started"])
        except OSError:  # it has gone
            return None
        except BaseException:  # a signal, say: what is still to be forked would have no owner
            self.close()
            raise

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of the supervisor `pid`; None if the server has not reported it."""
        with self._lock:
            try:
                while pid not in self._codes:
                    answer = self._receive(socket.MSG_DONTWAIT)
                    self._codes[answer["ended"]] = answer["code"]
            except OSError:
                pass
            return self._codes.get(pid)

    def has_gone(self) -> bool:
        """Whether the server has ended, and reports nothing any more."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server; the kernel then asks the processes that it has forked to stop."""
        self._process.kill()
        self._process.wait()
        self._parent.end()
        self._socket.close()

    def resume(self) -> None:
        """Resume a server stopped by SIGSTOP or a debugger, which would hold up all its forks."""
        if is_suspended(self._process.pid):
            log.warning("the process that starts ranks (%d) was stopped, and is resumed", self._process.pid)
            self._process.send_signal(signal.SIGCONT)

    def _receive(self, flags: int = 0) -> dict[str, int]:
        while not flags and not select.select([self._socket], [], [], _STOPPED_S)[0]:
            self.resume()
        data = self._socket.recv(_REQUEST_BYTES, flags)
        if not data:
            raise ConnectionResetError("the fork server has gone")
        answer: dict[str, int] = json.loads(data)
        return answer


class _ParentThread:
    """A thread that starts a process and outlives it. The kernel takes its end for the parent's.

    Args:
        start: starts the process.
    """

    def __init__(self, start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        self._started: Future[subprocess.Popen[bytes]] = Future()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start,), name="midstride fork server", daemon=True)
        self._thread.start()
        self.process = self._started.result()

    def end(self) -> None:
        """End the thread; the process has ended."""
        self._over.set()
        self._thread.join()

    def _run(self, start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        try:
            self._started.set_result(start())
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._over.wait()


class ForkedSupervisor:
    """A supervisor started by a fork server, with required methods of `subprocess.Popen`.

    Args:
        server: its parent.
        pid: process id of the supervisor.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and the server has said how
            self._handle = -1

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            code = self._server.code_of(self.pid)
            if code is None and self._has_ended():
                if self._server.has_gone():
                    code = 128 + signal.SIGTERM  # by which the kernel ends it when its server dies
                else:
                    self._server.resume()
            if code is not None:
                self.returncode = code
                if self._handle >= 0:
                    os.close(self._handle)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it runs on after `timeout` seconds.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if (left_s := until - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            if self._has_ended(min(left_s, _POLL_S)):
                time.sleep(0.002)  # until the server has told it
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None and self._handle >= 0:
            try:
                signal.pidfd_send_signal(self._handle, number)
            except ProcessLookupError:
                return

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout_s: float = 0.0) -> bool:
        return self._handle < 0 or bool(select.select([self._handle], [], [], timeout_s)[0])


class ForkingSupervisor(Supervisor):
    """Runs `python -m MODULE` as a call in a fork, if the fork server has imported the module."""

    def execute(self) -> None:
        """Become the command."""
        if self.command[:2] == [sys.executable, "-m"] and self.command[2] in sys.modules:
            sys.argv = self.command[2:]
            show_command(self.command)
            end_with(import_module(self.command[2]).main)
        super().execute()


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_EARLY) and name not in _READ_LATE
    }


def _supervise(connection: socket.socket, request: dict[str, Any], server: int) -> None:
    die_with_parent(server, signal.SIGTERM)
    connection.close()
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(request["folder"])
    show_command([sys.executable, "-m", "midstride.engine.processes.supervisor", *request["command"]])
    show_variable(SESSION, os.environ.get(SESSION, ""))
    sys.exit(ForkingSupervisor(request["command"], request["grace_s"]).run())


def _serve(connection: socket.socket, launcher: int) -> None:
    """Fork the requested programs and report their ends, until the launcher ends."""
    running: dict[int, ForkedProgram] = {}
    inbox = connection.fileno()
    while launcher not in (ready := select.select([inbox, launcher, *running], [], [])[0]):
        for handle in running.keys() & {*ready}:
            ended = running.pop(handle)
            os.close(handle)
            connection.send(json.dumps({"ended": ended.pid, "code": ended.wait()}).encode())
        if inbox in ready:
            if not (data := connection.recv(_REQUEST_BYTES)):
                return
            request = json.loads(data)
            started = ForkedProgram(partial(_supervise, connection, request, os.getpid()), request["environment"])
            running[os.pidfd_open(started.pid)] = started
            connection.send(json.dumps({"started": started.pid}).encode())


def main() -> None:
    """Be the server until the launcher or its socket ends."""
    parent, descriptor, *modules = sys.argv[1:]
    die_with_parent(int(parent))  # also while it is stopped
    launcher = os.pidfd_open(int(parent))
    show_variable(SESSION, os.environ[SESSION])  # where that cannot be done this ends, and nothing is forked
    preload(*modules)
    try:
        _serve(socket.socket(fileno=int(descriptor)), launcher)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
