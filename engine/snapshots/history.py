"""History: the only door for readers. It knows which snapshots of a run count. Needs no torch.

A snapshot counts if its manifest is whole, if it belongs to this run and its lineage, and if it was not set aside.
"""

import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotError, SnapshotMissing
from midstride.engine.snapshots.checksums import check_facts, facts_of, unseal
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.place import Place, parse_name, snapshot_name
from midstride.engine.snapshots.segments import Segments
from midstride.engine.snapshots.store import Store

__all__ = ["FORMAT", "MANIFEST", "ROWS", "SNAPSHOTS", "History", "Place", "Snapshot", "snapshot_name"]

FORMAT = 1  #: raised whenever the files of a snapshot change their meaning
SNAPSHOTS, MANIFEST, ROWS = "snapshots", "manifest.json", "metrics.csv"
_ASIDE = "aside.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot: its name, where it stands, who took it, and its manifest."""

    name: str
    place: Place
    generation: int
    manifest: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Size of all its files but the manifest."""
        return sum(facts["bytes"] for facts in self.manifest["files"].values())


class History:
    """The snapshots of the run in `store`, read afresh at every call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._segments = Segments(store)

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots that count, oldest first; only their manifests are read."""
        lineage = Lineage.of(self._store)
        return list(self._committed(lineage, self._folders(lineage)))

    def opened(self, name: str) -> Snapshot | None:
        """Return the snapshot called `name`, by its manifest; None if it was never committed.

        Raises:
            SnapshotDamaged: its manifest is not what was written, or is of another snapshot.
            SnapshotError: another version wrote it.
        """
        return self._open(name, Lineage.of(self._store))

    def newest_good(self) -> Snapshot | None:
        """Return the newest snapshot whose every byte was verified, setting damaged ones aside with a warning."""
        lineage = Lineage.of(self._store)
        for name, files in reversed(self._folders(lineage).items()):
            if MANIFEST not in files or _ASIDE in files:
                continue
            try:
                if (snapshot := self._open(name, lineage)) is not None:
                    self.verify(snapshot)
                    return snapshot
            except SnapshotMissing:
                continue  # pruned while it was read
            except SnapshotDamaged as error:
                log.warning("snapshot %s is set aside, an older one is taken: %s", name, error)
                self.set_aside(name, str(error))
        return None

    def verify(self, snapshot: Snapshot) -> None:
        """Read every file of `snapshot` and compare it with the manifest.

        Raises:
            SnapshotDamaged: a file is missing or differs; it is named with both values.
            SnapshotMissing: the snapshot is gone: pruned meanwhile.
        """
        folder = f"{SNAPSHOTS}/{snapshot.name}"
        for name, expected in snapshot.manifest["files"].items():
            where = f"{self._store.url}/{folder}/{name}"
            try:
                found = facts_of(self._store.stream(f"{folder}/{name}"))
            except FileNotFoundError as error:
                if not self._store.exists(f"{folder}/{MANIFEST}"):
                    raise SnapshotMissing(f"{self._store.url}/{folder} was removed while it was read") from error
                raise SnapshotDamaged(f"{where} is missing, its manifest says {expected['bytes']} bytes") from error
            check_facts(where, expected, found)

    def set_aside(self, snapshot: Snapshot | str, reason: str) -> None:
        """Mark a snapshot as not to be used again; its files are kept for whoever wants to look."""
        name = snapshot if isinstance(snapshot, str) else snapshot.name
        marker = json.dumps({"reason": reason, "time": time.time()}, indent=1)
        self._store.write(f"{SNAPSHOTS}/{name}/{_ASIDE}", marker.encode())

    def aside(self) -> list[tuple[str, str]]:
        """Return name and reason of every snapshot that was set aside."""
        marked = [name for name, files in self._folders().items() if parse_name(name) and _ASIDE in files]
        return [(name, json.loads(self._store.read(f"{SNAPSHOTS}/{name}/{_ASIDE}"))["reason"]) for name in marked]

    def rows(self) -> list[str]:
        """Return the segments of the metric log up to the newest snapshot that counts, oldest first.

        Raises:
            SnapshotDamaged: a segment is not what was written: the log would have a hole.
        """
        lineage = Lineage.of(self._store)
        folders = self._folders(lineage)
        committed = {snapshot.name: snapshot for snapshot in self._committed(lineage, folders)}
        end = max(committed, default="")
        segments = {name: rows for name, rows in self._segments.read().items() if lineage.holds(name)}
        for name, files in folders.items():
            if name > end or MANIFEST not in files:
                continue
            try:  # also of one set aside: its share of the log may be whole
                snapshot = committed.get(name) or self._open(name, lineage)
            except _Foreign:
                continue
            if snapshot is not None:
                segments[name] = self._rows_of(snapshot)
        return [segments[name] for name in sorted(segments) if name <= end]

    def prune(self, keep: int, also: Collection[str] = ()) -> list[str]:
        """Remove the snapshots that count, but for the newest `keep` and those named in `also`; return what went.

        Their metric rows move to a file of their own first. Folders that were never committed and no longer can be
        are swept as well; what was set aside stays.
        """
        committed = self.snapshots()
        old = [snapshot for snapshot in committed[: max(0, len(committed) - keep)] if snapshot.name not in also]
        for snapshot in old:
            self.remove(snapshot)
        if committed:
            self.sweep(committed[-1])
        return [snapshot.name for snapshot in old]

    def remove(self, snapshot: Snapshot, rows: str | None = None) -> None:
        """Remove `snapshot`; its metric rows, read now unless they are known, move to a file of their own first."""
        self._segments.add(snapshot.name, self._rows_of(snapshot) if rows is None else rows)
        # The manifest goes first: a kill in between leaves a snapshot that never happened, not a damaged one.
        self._store.remove_known(f"{SNAPSHOTS}/{snapshot.name}", [MANIFEST], [*snapshot.manifest["files"]])

    def _folders(self, lineage: Lineage | None = None) -> dict[str, set[str]]:
        """Return the files of every folder, or of those on the lineage, oldest first; names sort as places do."""
        folders: dict[str, set[str]] = {}
        for path in sorted(self._store.find(SNAPSHOTS)):
            name, _, file = path.partition("/")
            if lineage is None or lineage.holds(name):
                folders.setdefault(name, set()).add(file)
        return folders

    def _committed(self, lineage: Lineage, folders: Mapping[str, Collection[str]]) -> Iterator[Snapshot]:
        for name, files in folders.items():
            if MANIFEST not in files or _ASIDE in files:
                continue
            try:
                snapshot = self._open(name, lineage)
            except SnapshotDamaged:
                continue  # the next newest_good sets it aside
            if snapshot is not None:
                yield snapshot

    def _open(self, name: str, lineage: Lineage) -> Snapshot | None:
        """Return the snapshot in the folder `name`; None if it was never committed."""
        parsed = parse_name(name)
        where = f"{self._store.url}/{SNAPSHOTS}/{name}/{MANIFEST}"
        try:
            manifest = unseal(self._store.read(f"{SNAPSHOTS}/{name}/{MANIFEST}"), where)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if parsed is None or manifest["format"] != FORMAT:
            raise SnapshotError(
                f"{where} has format {manifest['format']}, this version reads {FORMAT}. "
                "Resume with the version that wrote it."
            )
        place, generation = parsed
        if lineage.run_id and manifest.get("run_id") != lineage.run_id:
            run, run_id = manifest.get("run"), manifest.get("run_id")
            raise _Foreign(f"{where} is of another run: {run!r} ({run_id}), this run is {lineage.run_id}")
        found = snapshot_name(Place(manifest["step"], manifest["after"]), manifest["generation"])
        if found != name:
            raise _Foreign(f"{where} is the manifest of snapshot {found}, not of {name}")
        return Snapshot(name, place, generation, manifest)

    def _rows_of(self, snapshot: Snapshot) -> str:
        path = f"{SNAPSHOTS}/{snapshot.name}/{ROWS}"
        where = f"{self._store.url}/{path}"
        try:
            data = self._store.read(path)
        except FileNotFoundError as error:
            raise SnapshotDamaged(f"{where} is missing: the metric log would have a hole") from error
        check_facts(where, snapshot.manifest["files"][ROWS], facts_of([data]))
        return data.decode()

    def sweep(self, last: Snapshot) -> None:
        """Remove uncommitted folders that sort before `last`: what a kill or an older generation left."""
        folders = self._folders()
        for name in sorted({*folders, *self._store.unfinished(SNAPSHOTS)}):
            parsed = parse_name(name)
            if parsed is None or name >= last.name or parsed[1] > last.generation:
                continue
            if not {MANIFEST, _ASIDE} & folders.get(name, set()):
                self._store.remove(f"{SNAPSHOTS}/{name}")


class _Foreign(SnapshotDamaged):
    """A folder that holds a snapshot of another run, or of another place."""
