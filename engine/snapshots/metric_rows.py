"""Rows of the metric log as CSV: one text a snapshot, joined into one log. Needs no torch."""

import csv
import io
from collections.abc import Iterable
from typing import Any

__all__ = ["join_segments", "missing_steps", "to_csv"]


def join_segments(segments: Iterable[str]) -> str:
    """Return one CSV of all segments, its columns in the order of their first appearance."""
    rows: list[dict[str, Any]] = []
    for segment in segments:
        for row in csv.DictReader(io.StringIO(segment)):
            rows.append({name: value for name, value in row.items() if value != ""})
    return to_csv(rows)


def missing_steps(segments: Iterable[str], until: int) -> list[tuple[int, int]]:
    """Return the first and the last of the steps up to `until` that follow one another and have no row."""
    there: set[int] = set()
    for segment in segments:
        header, *rows = csv.reader(io.StringIO(segment)) if segment else [["step"]]
        if "step" not in header:
            return []  # no metric log of a fit
        column = header.index("step")
        there.update(int(row[column]) for row in rows)
    missing: list[tuple[int, int]] = []
    for step in range(1, until + 1):
        if step not in there:
            extends = missing and missing[-1][1] == step - 1
            missing.append((missing.pop()[0] if extends else step, step))
    return missing


def to_csv(rows: list[dict[str, Any]]) -> str:
    """Return `rows` as CSV, columns in the order of their first appearance; nothing for no rows."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[row.get(name, "") for name in columns] for row in rows])
    return text.getvalue()
