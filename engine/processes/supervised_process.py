"""A process and all it starts, as one thing that can be watched and ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from midstride.engine.processes.fork_server import ForkedSupervisor, running_server
from midstride.engine.processes.lifetime import SESSION, descendants, processes_with_env, signal_all
from midstride.engine.processes.signal_handlers import signal_handlers

__all__ = ["SupervisedProcess", "start_supervisor"]

_AFTER_GRACE_S = 2.0  # for the supervisor to end what did not stop on request
_UNKILLABLE_S = 5.0  # to wait for a process inside a system call, which dies only once that returns


class SupervisedProcess:
    """A command under a supervisor, in its own session, with its output in a file.

    Whatever ends the `with` block ends the command and all processes that it has started, the group. If this process
    is killed, the supervisor ends them.

    Args:
        command: what to run.
        environment: the whole environment; `MIDSTRIDE_SESSION` in it marks the group's processes.
        log: file that gets every line of output.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, grace_s: float) -> None:
        self.grace_s = grace_s
        self._session = environment.get(SESSION)
        self._log = log
        self._offset = log.stat().st_size if log.exists() else 0
        self._supervisor = start_supervisor(command, environment, log, grace_s)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._supervisor.pid

    def __enter__(self) -> "SupervisedProcess":
        """Return the group, running."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the group."""
        self.stop()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._supervisor.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code as soon as there is one; None if the group runs on after `timeout_s`."""
        try:
            return self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        ended = self._supervisor.poll() is not None
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # what tidies the folder for temporary files has removed it
            return []
        if not ended:  # a progress bar ends its lines with \r
            data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
        self._offset += len(data)
        text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        return text.removesuffix("\n").split("\n") if text else []

    def stop(self) -> int:
        """Ask the group to stop, kill it after the grace, and return its exit code.

        SIGTERM and SIGHUP to this process are ignored meanwhile.

        Raises:
            BaseException: what else interrupts the wait, such as Ctrl-C; the group is then killed at once.
        """
        with signal_handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)):
            try:
                if self._supervisor.poll() is None:
                    self._supervisor.terminate()
                    until = time.monotonic() + self.grace_s + _AFTER_GRACE_S
                    while self._supervisor.poll() is None and time.monotonic() < until:
                        time.sleep(0.02)
            finally:
                self._end()
        return self._supervisor.wait()

    def ask_for_snapshot(self) -> None:
        """Pass SIGUSR1 on."""
        if self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the group at once: a process that hangs hears no signal."""
        self._end()

    def _end(self) -> None:
        self._end_leftovers()
        if self._supervisor.poll() is None:
            if sys.platform != "linux":
                os.killpg(self._supervisor.pid, signal.SIGKILL)
            self._supervisor.kill()
            self._supervisor.wait()
            self._end_leftovers()  # what it had adopted meanwhile

    def _end_leftovers(self) -> None:
        until = time.monotonic() + _UNKILLABLE_S
        while (left := self._leftovers()) and time.monotonic() < until:
            signal_all(left)
            time.sleep(0.01)

    def _leftovers(self) -> list[int]:
        """Processes of the group that live on, the supervisor apart."""
        running = self._supervisor.poll() is None
        left = set(descendants(self._supervisor.pid)) if running else set()
        if self._session:
            left |= set(processes_with_env(SESSION, self._session))
        return sorted(left - {self._supervisor.pid})


def start_supervisor(
    command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float
) -> "subprocess.Popen[bytes] | ForkedSupervisor":
    """Start the supervisor of `command` in its own session.

    Arguments are those of `SupervisedProcess`.

    Where a fork server runs that suits, it is forked from there, else a fresh Python.
    """
    if server := running_server(environment):
        log.touch()
        if forked := server.start_supervisor(command, environment, log, grace_s):
            return forked
    supervisor = [sys.executable, "-m", "midstride.engine.processes.supervisor", str(os.getpid()), str(grace_s)]
    # Its own session: signals for our group (Ctrl-C, a runner's killpg) must reach it through us, once.
    # Output into a file: a world that inherited our stdout would keep it open after our death, and what
    # reads it waiting; a pipe would fill while we are busy and break when we are killed, and a rank that
    # prints into it would then hang, or fail as if its own code were wrong.
    with log.open("ab") as output:
        return subprocess.Popen(
            [*supervisor, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
