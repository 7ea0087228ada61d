"""Processes beside rank 0, each of which delivers to one tracker.

A library of a tracker draws random numbers, installs handlers, imports much and may wait for minutes: in a process of
its own it does so at no cost to the training, and changes no bit of it.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.loggers.delivery import UNSENT_EXIT_CODE, unsent
from midstride.engine.processes.child_processes import end_within
from midstride.engine.processes.lifetime import PARENT
from midstride.engine.storage.store import Store

__all__ = ["LoggerProcesses"]

#: what of the environment makes a process a rank, or a part of one
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
#: seconds that a process gets beyond those for which it waits for its tracker
_GRACE_S = 5.0


class LoggerProcesses:
    """The loggers of one attempt of a run.

    Args:
        loggers: one process each.
        store: of the run.
        generation: of this attempt.
    """

    def __init__(self, loggers: Sequence[LoggerOptions], store: Store, generation: int) -> None:
        self._loggers, self._url = loggers, store.url
        self._processes = [self._start(options, store, generation) for options in loggers]

    def wake(self) -> None:
        """Tell that a snapshot was committed; never waits, in any thread."""
        for process in self._processes:
            _tell(process, b"\n")

    def finish(self) -> None:
        """Let each deliver what is left, and the best weights; as long as its options allow."""
        for process in self._processes:
            _tell(process, b"end\n")
        for options, process in zip(self._loggers, self._processes, strict=True):
            if not end_within(process, options.wait_s + _GRACE_S):
                why = f"it hung for {options.wait_s:g} s after the end, and was ended"
            elif process.returncode not in (0, UNSENT_EXIT_CODE):
                why = f"its process ended with {process.returncode}"
            else:
                continue
            print(unsent(options.path, self._url, why), file=sys.stderr, flush=True)
        self.close()

    def close(self) -> None:
        """End the processes; what was not delivered, the next attempt delivers."""
        for process in self._processes:
            end_within(process, 0)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._processes = []

    @staticmethod
    def _start(options: LoggerOptions, store: Store, generation: int) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        document = {
            "logger": options.model_dump(mode="json"),
            "url": store.url,
            "lease": store.options.lease,
            "generation": generation,
            "path": sys.path,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "midstride.engine.loggers.delivery"],
            env={**environment, PARENT: str(os.getpid())},
            stdin=subprocess.PIPE,
            bufsize=0,
        )
        _tell(process, json.dumps(document).encode() + b"\n")
        os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
        return process


def _tell(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    """Write to a process, unless it has ended or has enough to read."""
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(process.stdin.fileno(), line)  # type: ignore[union-attr]
