"""`Logger`, the base class of loggers, and its arguments."""

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from midstride.engine.snapshots.row_times import RowTimes

__all__ = ["CommittedRows", "Conclusion", "LoggedRun", "Logger", "Row"]


class Row(NamedTuple):
    """A row of the metric log: the values logged for one optimizer step; each step has one row."""

    epoch: int
    step: int
    values: dict[str, float]


class CommittedRows(Iterable[Row]):
    """Rows of committed snapshots in the order of their steps. They can be read several times.

    Args:
        segments: CSV texts, one per snapshot.
    """

    def __init__(self, segments: Sequence[str]) -> None:
        self._segments = segments

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows."""
        for segment in self._segments:
            for row in csv.DictReader(io.StringIO(segment)):
                values = {name: float(text) for name, text in row.items() if text and name not in ("epoch", "step")}
                yield Row(int(row["epoch"]), int(row["step"]), values)

    @property
    def last_step(self) -> int:
        """The step of the last row; 0 if there is none."""
        return max((row.step for row in self), default=0)


@dataclass(frozen=True)
class LoggedRun:
    """The run whose rows a logger sends to its tracker.

    Args:
        name: name of the run, also in the tracker.
        url: folder or URL of the run.
        run_id: unique id of the run, the same in all its attempts; empty for a run without leases.
        hparams: hyperparameters and identity of the run, by dotted name.
        times: when each step was done; it grows while the run is open.
    """

    name: str
    url: str
    run_id: str
    hparams: Mapping[str, Any]
    times: RowTimes = field(default_factory=RowTimes, compare=False)


@dataclass(frozen=True)
class Conclusion:
    """End of a run: reason, test and report.

    Args:
        outcome: "done", "stopped", or how it failed.
        why: the same as a sentence.
        step: optimizer steps taken.
        test: results of a test, by name.
        report: the run's report in Markdown; empty before there is one.
    """

    outcome: str
    why: str
    step: int
    test: Mapping[str, float] = field(default_factory=dict)
    report: str = ""


class Logger(ABC):
    """Base class of loggers: sends the rows of a run to a tracker.

    A logger works in its own process beside the training. Each attempt of the run builds it there, so its constructor
    only keeps its arguments. An error is reported once as a warning, and `open` is called again later.
    """

    @abstractmethod
    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        """Connect to the tracker. Return the step of its last row of `rows`, or 0 without one.

        An earlier process can have died after it sent rows, so this asks the tracker. Rows that the tracker has and
        `rows` lacks, since the run went back behind them, must not be visible there afterwards.
        """

    @abstractmethod
    def log_rows(self, rows: Sequence[Row]) -> None:
        """Send rows; afterwards `open` of a later attempt must find them."""

    def conclude(self, conclusion: Conclusion) -> None:
        """Send the end of the run, before `finish`.

        It is called again once there are results of a test and a report.
        """

    def finish(self, best: Path | None) -> None:
        """Send the best weights; called when the run is over and all its rows are sent.

        Args:
            best: file of the best weights, a state dict as safetensors; None if there are none.
        """

    def promote(self, run: LoggedRun, weights: Path) -> None:
        """Register the weights of a job's champion; called after each night, also without a change.

        The logger is not open, and runs in a process that does nothing else.

        Args:
            run: the champion's run.
            weights: file of its weights, a state dict as safetensors; removed after this call.
        """

    def close(self) -> None:
        """Disconnect from the tracker; `open` can follow."""
