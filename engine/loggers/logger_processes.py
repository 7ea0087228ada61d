"""Processes beside rank 0 that send rows to trackers, one process each.

The library of a tracker draws random numbers, installs signal handlers, imports much and can wait for minutes. In its
own process it neither slows the training nor changes its bits.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.loggers.base import Conclusion
from midstride.engine.loggers.delivery import UNSENT_EXIT_CODE, unsent
from midstride.engine.processes.child_processes import end_within
from midstride.engine.processes.lifetime import PARENT
from midstride.engine.storage.store import Store

__all__ = ["LoggerProcesses", "conclude"]

#: environment variables that make a process a rank
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
#: seconds that a process gets beyond its wait for the tracker
_GRACE_S = 5.0
#: seconds that a process gets to start, which does so at the end
_STARTS_S = 60.0
#: seconds that a tracker gets at most to take how a run ended
_CONCLUDES_S = 10.0


class LoggerProcesses:
    """The loggers of one attempt of a run.

    Args:
        loggers: the options of each logger.
        store: store of the run.
        generation: generation of this attempt; None outside of one.
        conclusion: how the run ended, to be sent at the end in place of the best weights.
        folder: of the code of loggers of one's own; by default that of this program.
    """

    def __init__(
        self,
        loggers: Sequence[LoggerOptions],
        store: Store,
        generation: int | None,
        conclusion: Conclusion | None = None,
        folder: str = "",
    ) -> None:
        self._loggers, self._url = loggers, store.url
        self._grace_s = _GRACE_S if conclusion is None else _GRACE_S + _STARTS_S
        rest = {
            "url": store.url,
            "lease": store.options.lease,
            "generation": generation,
            "conclusion": conclusion and asdict(conclusion),
            "path": [folder, *sys.path] if folder else sys.path,
        }
        self._processes = [self._start({"logger": one.model_dump(mode="json"), **rest}) for one in loggers]

    def wake(self) -> None:
        """Announce a committed snapshot from any thread, without a wait."""
        for process in self._processes:
            _tell(process, b"\n")

    def finish(self) -> None:
        """Let each process send remaining rows and the best weights within its time limit."""
        for process in self._processes:
            _tell(process, b"end\n")
        for options, process in zip(self._loggers, self._processes, strict=True):
            if not end_within(process, options.wait_s + self._grace_s):
                why = f"it hung for {options.wait_s:g} s after the end, and was ended"
            elif process.returncode not in (0, UNSENT_EXIT_CODE):
                why = f"its process ended with {process.returncode}"
            else:
                continue
            print(unsent(options.path, self._url, why), file=sys.stderr, flush=True)
        self.close()

    def close(self) -> None:
        """End the processes; the next attempt sends the remaining rows."""
        for process in self._processes:
            end_within(process, 0)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._processes = []

    @staticmethod
    def _start(document: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        process = subprocess.Popen(
            [sys.executable, "-m", "midstride.engine.loggers.delivery"],
            env={**environment, PARENT: str(os.getpid())},
            stdin=subprocess.PIPE,
            bufsize=0,
        )
        _tell(process, json.dumps(document).encode() + b"\n")
        os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
        return process


def conclude(loggers: Sequence[LoggerOptions], store: Store, conclusion: Conclusion, folder: str = "") -> None:
    """Let each of `loggers` send the run's end, without a second wait for a tracker."""
    if loggers:
        hasty = [one.model_copy(update={"wait_s": min(one.wait_s, _CONCLUDES_S)}) for one in loggers]
        LoggerProcesses(hasty, store, None, conclusion, folder).finish()


def _tell(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    """Write to a process, unless it has ended or its pipe is full."""
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(process.stdin.fileno(), line)  # type: ignore[union-attr]
