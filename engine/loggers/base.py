"""What a logger is, and what it is given."""

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CommittedRows", "LoggedRun", "Logger", "Row"]


class Row(NamedTuple):
    """A row of the metric log: the values logged for one optimizer step; each step has one row."""

    epoch: int
    step: int
    values: dict[str, float]


class CommittedRows(Iterable[Row]):
    """The rows of some committed snapshots, in the order of their steps; they may be read several times.

    Args:
        segments: CSV, one text a snapshot.
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
    """The run whose rows a logger brings to its tracker.

    Args:
        name: of the run; a tracker calls its own run so.
        url: folder or URL of the run.
        run_id: of the run, alike in all its attempts, of no other run; empty for a run without leases.
        hparams: what decides the run, by dotted name.
    """

    name: str
    url: str
    run_id: str
    hparams: Mapping[str, Any]


class Logger(ABC):
    """Base of loggers: brings the rows of a run to a tracker.

    A logger works in a process of its own, beside the training. It is built there, anew in each attempt of the run, so
    its constructor keeps its arguments and does nothing else. What it raises is told once as a warning, and `open` is
    called again later.
    """

    @abstractmethod
    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        """Meet the tracker; return the step of the last of `rows` that it has, 0 if it has none.

        The process may have died after rows were sent and before anything was noted, so this asks the tracker. What the
        tracker has and `rows` have not (the run went back behind rows that were sent) must not be seen there any more.
        """

    @abstractmethod
    def log_rows(self, rows: Sequence[Row]) -> None:
        """Send rows; when this returns, `open` of a later attempt would find them."""

    def finish(self, best: Path | None) -> None:
        """The run is over and all its rows are sent.

        Args:
            best: file of the best weights, a state dict as safetensors; None if there are none.
        """

    def promote(self, run: LoggedRun, weights: Path) -> None:
        """The weights of a run are in charge of its job; called after each night, also where nothing has changed.

        The logger is not open, and is in a process that does nothing else.

        Args:
            run: the champion's.
            weights: file of its weights, a state dict as safetensors; gone when this returns.
        """

    def close(self) -> None:
        """Let go of the tracker; `open` may be called again."""
