"""Rows of a replay, compared with those of the run, bit for bit. Needs no torch."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["RowDifference", "first_difference", "parse_rows"]

Row = Mapping[str, str]


@dataclass(frozen=True)
class RowDifference:
    """The first value in which two metric logs differ; "" if a log has none there."""

    step: int
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}: {self.expected or 'nothing'} in the run, {self.found or 'nothing'} here"


def parse_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of a metric log, without empty cells."""
    return [{name: value for name, value in row.items() if value} for row in csv.DictReader(io.StringIO(text))]


def first_difference(expected: Sequence[Row], found: Sequence[Row], until: int | None = None) -> RowDifference | None:
    """Return the first difference between rows of the same steps; None if all are equal.

    Args:
        expected: rows of the run.
        found: rows of the replay; steps that the run has not logged are left out.
        until: the last step of the replay, which later values of the run's row do not belong to.
    """
    by_step = {row["step"]: row for row in expected}
    for row in found:
        step = int(row["step"])
        if (theirs := by_step.get(row["step"])) is None:
            continue
        for name in row if step == until else {**theirs, **row}:
            if theirs.get(name, "") != row.get(name, ""):
                return RowDifference(step, name, theirs.get(name, ""), row.get(name, ""))
    return None
