"""Processes that this one starts from a function, signals, reaps, and never leaves behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NoReturn

from midstride.engine.processes.environment import hash_seed_set
from midstride.engine.processes.forked_program import exit_code, flush_files
from midstride.engine.processes.lifetime import die_with, signal_all

__all__ = ["ChildProcesses", "end_within"]


class ChildProcesses:
    """Processes that each call one function, such as the ranks of a world on this machine.

    They run inside the `with` block; whatever ends the block ends them. If this process is killed, they end too.

    Args:
        target: the function. When it returns, its process flushes its output and regular files, closes archives, and
            exits with 0, without tearing down what it inherited; after a SystemExit with its code, after any other
            exception with 1 and a traceback.
        arguments: of the call; pickled, unless processes are forked.
        environments: the whole environment of each process; there are as many processes.
        method: as `multiprocessing` starts a process.
    """

    def __init__(
        self,
        target: Callable[..., object],
        arguments: Sequence[Any],
        environments: Sequence[Mapping[str, str]],
        method: Literal["fork", "spawn", "forkserver"] = "fork",
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        starter = os.getpid()
        self._environments = environments
        self._processes: list[BaseProcess] = [
            context.Process(target=_run, args=(starter, dict(environment), target, tuple(arguments)))
            for environment in environments
        ]

    def __enter__(self) -> "ChildProcesses":
        """Return the processes, running."""
        try:
            for process, environment in zip(self._processes, self._environments, strict=True):
                with hash_seed_set(environment):
                    process.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill those that still run, and wait for their end."""
        self._end()

    def running(self) -> list[int]:
        """Return the numbers, from 0, of the processes that have not ended."""
        return [number for number, code in enumerate(self.exit_codes()) if code is None]

    def exit_codes(self) -> list[int | None]:
        """Return how each process ended: -n by signal n, None if it has not."""
        return [process.exitcode for process in self._processes]

    def wait(self, timeout_s: float) -> None:
        """Wait until one of those that run ends, or the time is over."""
        if running := [self._processes[number].sentinel for number in self.running()]:
            wait(running, timeout=timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to those that run."""
        signal_all([pid for process in self._processes if process.exitcode is None and (pid := process.pid)], number)

    def _end(self) -> None:
        for process in self._processes:
            if process.pid is not None:
                process.kill()
        for process in self._processes:
            if process.pid is not None:
                process.join()


def _run(starter: int, environment: dict[str, str], target: Callable[..., object], arguments: Any) -> NoReturn:
    # First of all: a fork has none of the parent's threads, and to wait for one would hang. Destructors of objects that
    # the parent has left to its garbage collector may do so, such as that of the store of an earlier fit.
    gc.freeze()
    die_with(starter)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        target(*arguments)
        code = 0
    except SystemExit as end:
        code = exit_code(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        flush_files()
        os._exit(code)


def end_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for `process`; kill it if it runs on after `seconds`. Return whether it ended before."""
    try:
        process.wait(max(0.0, seconds))
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
