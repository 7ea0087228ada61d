"""Programs and worlds in forks of one process that has torch imported, where a fresh Python would be the whole cost.

The server is the one that ranks of `run_ranks` are forked from; a session that uses it starts it first (`_warm` in
conftest.py). `/proc` shows a fork with the environment of the server.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

from midstride.engine.processes.lifetime import die_with_parent
from midstride.engine.processes.supervisor import Keeper

__all__ = ["ForkedKeeper", "run_program", "start_keeper"]

#: what is called in a fork instead of being started by `python -m`; any other command is executed as it is
CALLED = ("midstride.engine.jobs.isolated", "midstride.engine.launch.fork_server", "midstride.engine.launch.rank")


def run_program(path: Path, log: Path) -> int:
    """Return the exit code of `python PATH`, run in a fork; what it prints goes to `log`."""
    process = _fork(_program, str(path), environment=os.environ, log=log)
    process.join()
    return process.exitcode or 0


def start_keeper(command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float) -> "ForkedKeeper":
    """Start a keeper as `midstride.engine.processes.supervised` does, in a fork."""
    log.touch()
    return ForkedKeeper(_fork(_keep, [*command], grace_s, environment=environment, log=log))


class ForkedKeeper:
    """What a `ProcessGroup` needs of a process that it has started."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _CallingKeeper(Keeper):
    def execute(self) -> None:
        if self.command[:2] == [sys.executable, "-m"] and self.command[2] in CALLED:
            sys.argv = self.command[2:]
            _exit_with(import_module(self.command[2]).main)
        super().execute()


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
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    _exit_with(lambda: target(*arguments))


def _keep(command: list[str], grace_s: float) -> None:
    die_with_parent(os.getppid(), signal.SIGTERM)
    sys.exit(_CallingKeeper(command, grace_s).run())


def _program(path: str) -> None:
    sys.argv, sys.orig_argv = [path], [sys.executable, path]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _exit_with(call: Callable[[], Any]) -> NoReturn:
    """End this process as an interpreter does whose program is `call`, without tearing torch down."""
    code: object = 0
    try:
        call()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
