"""Programs and worlds in forks of one process that has torch imported, where a fresh Python would be the whole cost.

The server is the one that ranks of `run_ranks` are forked from; a session that uses it starts it first (`_warm` in
conftest.py). `/proc` shows a fork with the environment of the server.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from midstride.engine.processes.fork_server import ForkingSupervisor
from midstride.engine.processes.forked_program import end_with, take_environment
from midstride.engine.processes.lifetime import die_with_parent


def outside() -> dict[str, str]:
    """Return this environment, without the place of a rank in it."""
    return {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))}


def run_program(path: Path, log: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> int:
    """Return the exit code of `python PATH ARGUMENTS`, run in a fork; what it prints goes to `log`."""
    return start_program(path, log, *arguments, environment=environment).wait()


def start_program(
    path: Path, log: Path, *arguments: str, environment: Mapping[str, str] = os.environ
) -> "ForkedProcess":
    """Start `python PATH ARGUMENTS` in a fork; what it prints goes to `log`."""
    return ForkedProcess(_fork(_program, str(path), arguments, environment=environment, log=log))


def start_supervisor(
    command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float
) -> "ForkedProcess":
    """Start a supervisor as `midstride.engine.processes.supervised_process` does, in a fork."""
    log.touch()
    return ForkedProcess(_fork(_supervise, [*command], grace_s, environment=environment, log=log))


class ForkedProcess:
    """A process that was started, as `subprocess.Popen` shows it."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _fork(target: Callable[..., None], *arguments: Any, environment: Mapping[str, str], log: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_begin, args=(dict(environment), str(log), target, arguments))
    process.start()
    return process


def _begin(environment: dict[str, str], log: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Be as a process that was just started: a session, streams, an environment of its own."""
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, source in enumerate((nothing, output, output)):
        os.dup2(source, stream)
    sys.stdout.reconfigure(line_buffering=True)
    take_environment(environment)
    multiprocessing.set_start_method("fork", force=True)
    end_with(lambda: target(*arguments))


def _supervise(command: list[str], grace_s: float) -> None:
    die_with_parent(os.getppid(), signal.SIGTERM)
    sys.exit(ForkingSupervisor(command, grace_s).run())


def _program(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv, sys.orig_argv = [path, *arguments], [sys.executable, path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")
