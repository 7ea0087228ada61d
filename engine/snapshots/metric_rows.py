"""Metric log in snapshots: CSV segments, and those of removed snapshots. No torch.

    metrics/<snapshot>.<who>.<checksum>.csv   the rows of one snapshot, which is gone or about to go
    metrics/folded-1-<snapshot>.json          the rows of many, by snapshot, with a checksum; named after the last one

The number of files stays small: 64 files of one kind are folded into one of the next.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.storage.checksums import check_digest, decode_document, digest_of, encode_document
from midstride.engine.storage.store import Store

__all__ = ["MetricSegments", "join_segments", "missing_steps", "to_csv"]

FOLDER = "metrics"
#: so many files of one kind become one
FOLD = 64
_FOLDED = "folded-"
_NAME = re.compile(r"folded-\d+-.+\.json|[^.].*\.[^.]+\.[^.]+\.csv")


def join_segments(segments: Iterable[str]) -> str:
    """Return one CSV of all segments, its columns in the order of their first appearance."""
    rows: list[dict[str, Any]] = []
    for segment in segments:
        for row in csv.DictReader(io.StringIO(segment)):
            rows.append({name: value for name, value in row.items() if value != ""})
    return to_csv(rows)


def missing_steps(segments: Iterable[str], until: int) -> list[tuple[int, int]]:
    """Return the first and last of each range of steps up to `until` without a row."""
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


class MetricSegments:
    """The rows of pruned snapshots.

    Each object writes files of its own, so it takes back none of another's.

    Args:
        store: of the run.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._who = store.at(FOLDER), uuid4().hex[:8]
        self._single: int | None = None  # files that hold the rows of one snapshot; None: not counted yet

    def add(self, snapshot: str, rows: str) -> None:
        """Keep the rows of one more snapshot."""
        self.write(snapshot, rows)
        self.fold()

    def write(self, snapshot: str, rows: str) -> str:
        """Write the rows of one more snapshot, and return the name of their file."""
        data = rows.encode()
        file = f"{snapshot}.{self._who}.{digest_of([data])['xxh3_128']}.csv"
        self._store.write(file, data)
        self._single = None if self._single is None else self._single + 1
        return file

    def take_back(self, file: str) -> None:
        """Remove a file that `write` has written."""
        self._store.remove(file)
        self._single = None if self._single is None else self._single - 1

    def has(self, snapshot: str) -> bool:
        """Return whether the rows of a snapshot are among these."""
        files = [file for file in self._files() if _last_of(file) >= snapshot]
        if any(not file.startswith(_FOLDED) and _last_of(file) == snapshot for file in files):
            return True
        return snapshot in self._rows([file for file in files if file.startswith(_FOLDED)])[0]

    def read(self, after: str = "") -> tuple[dict[str, str], list[str]]:
        """Return the rows by name of their snapshot, and messages on damaged files.

        Args:
            after: leave out snapshots whose names do not sort after this one.
        """
        rows, damaged = self._rows([file for file in self._files() if _last_of(file) > after])
        return {name: text for name, text in rows.items() if name > after}, [*damaged.values()]

    def _rows(self, files: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the rows in `files` by snapshot, and by file why those of it are not there."""
        rows: dict[str, str] = {}
        damaged: dict[str, str] = {}
        for file in files:
            try:
                rows.update(self._rows_of(file))
            except FileNotFoundError:
                continue  # folded meanwhile
            except SnapshotDamaged as error:
                damaged[file] = str(error)
        return dict(sorted(rows.items())), damaged

    def _files(self) -> list[str]:
        return [file for file in self._store.list() if _NAME.fullmatch(file)]

    def _rows_of(self, file: str) -> Mapping[str, str]:
        where = f"{self._store.url}/{file}"
        with self._store.reading(file):
            data = self._store.read(file)
        if file.startswith(_FOLDED):
            rows: dict[str, str] = decode_document(data, where, rows=dict)["rows"]
            return rows
        name, _, digest = file.removesuffix(".csv").rsplit(".", 2)
        check_digest(where, {"bytes": len(data), "xxh3_128": digest}, digest_of([data]))
        return {name: data.decode()}

    def fold(self) -> None:
        """Make one file of many where they are enough."""
        if self._single is None or self._single >= FOLD:
            self._single = self._fold()

    def _fold(self) -> int:
        """Make one of many where they are enough; return how many single ones are left."""
        by_level: dict[int, list[str]] = defaultdict(list)
        for file in self._files():
            by_level[_level(file)].append(file)
        for level, files in sorted(by_level.items()):
            if len(files) < FOLD:
                continue
            rows, damaged = self._rows(files)
            whole = [file for file in files if file not in damaged]
            if len(whole) < FOLD:
                continue
            # The whole first, then its parts go: a kill in between leaves rows that are there twice, and alike.
            self._store.write(f"{_FOLDED}{level + 1}-{max(rows)}.json", encode_document({"rows": rows}))
            for file in whole:
                self._store.remove(file)
        single = len(by_level[0])
        return single if single < FOLD else 0


def _last_of(file: str) -> str:
    """Return the name of the last snapshot whose rows are in `file`."""
    if file.startswith(_FOLDED):
        return file.removeprefix(_FOLDED).partition("-")[2].removesuffix(".json")
    return file.removesuffix(".csv").rsplit(".", 2)[0]


def _level(file: str) -> int:
    return int(file.removeprefix(_FOLDED).partition("-")[0]) if file.startswith(_FOLDED) else 0
