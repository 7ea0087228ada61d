"""Catalog of a run's valid snapshots and weights, which all readers ask. Needs no torch.

A snapshot counts if its manifest is whole, it belongs to this run and its lineage, and it was not set aside. Weights
in `best` and `last` are snapshots of the module alone and follow the same rules.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotError, SnapshotMissing, SnapshotUnreadable
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.metric_rows import MetricSegments, join_segments, missing_steps
from midstride.engine.snapshots.parent import ForkedStore, inherited_run_id, inherits
from midstride.engine.snapshots.position import Position, file_stem, parse_name, snapshot_name
from midstride.engine.state.bounds import check_files, damaged_on_error, sizes
from midstride.engine.storage.checksums import NUMBER, Kind, check_kinds, decode_object
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_document, read_verified, verify_files

__all__ = [
    "FORMAT",
    "MANIFEST",
    "ROWS",
    "RUN_FILES",
    "RUN_FOLDERS",
    "SNAPSHOTS",
    "WEIGHTS",
    "Catalog",
    "Position",
    "Snapshot",
    "SnapshotCatalog",
    "snapshot_name",
]

FORMAT = 3  #: raised whenever the files of a snapshot change their meaning
SNAPSHOTS, MANIFEST, ROWS = "snapshots", "manifest.json", "metrics.csv"
#: the folders of weights in that of a run
WEIGHTS = ("best", "last")
#: the folders in that of a run
RUN_FOLDERS = (SNAPSHOTS, "lease", "metrics", *WEIGHTS, "attempts")
#: the files in it
RUN_FILES = ("run.json", "job.json", "metrics.csv")
_ASIDE = "aside.json"
#: the keys of a manifest, and their types
_KINDS: dict[str, Kind] = {
    "format": int,
    "run_id": str,
    "step": int,
    "after": int,
    "generation": int,
    "world_size": int,
    "files": dict,
    "facts": dict,
    "time": NUMBER,
}
#: the types of those facts that are read without the run's code
_FACTS: dict[str, Kind] = {
    "identity": dict,
    "bits": dict,
    "progress": dict,
    "weights": dict,
    "weights_facts": dict,
    "hparams": dict,
    "overridden": dict,
    "left_out": list,
    "metrics": dict,
    "monitors": list,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot, or committed weights: name, position, generation, manifest.

    Args:
        name: of its folder.
        position: where the run stood.
        generation: which attempt wrote it.
        manifest: its files, with checksums, and facts.
        folder: the folder of the run it lies in: "snapshots", "best" or "last"; "" for a copy outside of a run.
    """

    name: str
    position: Position
    generation: int
    manifest: dict[str, Any]
    folder: str = SNAPSHOTS

    @property
    def path(self) -> str:
        """Its folder, relative to the store."""
        return f"{self.folder}/{self.name}" if self.folder else self.name

    @property
    def bytes(self) -> int:
        """Size of all its files but the manifest."""
        return sum(digest["bytes"] for digest in self.manifest["files"].values())

    def stem(self, rank: int) -> str:
        """Return the name, without its ending, of the files that `rank` wrote."""
        return file_stem(self.folder == SNAPSHOTS, rank, self.manifest["world_size"])


class Catalog:
    """The snapshots in one folder of a run, read afresh at every call.

    Args:
        store: of the run.
        folder: "snapshots", or "best" and "last" for weights.
    """

    def __init__(self, store: Store, folder: str = SNAPSHOTS) -> None:
        self._store, self._folder = store, folder

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots that count, oldest first; only their manifests are read."""
        lineage = Lineage.of(self._store)
        return list(self._committed(lineage, self._folders(lineage)))

    def get(self, name: str, lineage: Lineage | None = None) -> Snapshot | None:
        """Return the snapshot called `name`, by its manifest; None if it was never committed.

        Args:
            name: of its folder.
            lineage: of the run, which is read if it is not given.

        Raises:
            SnapshotDamaged: its manifest has unexpected content, or is of another snapshot.
            SnapshotError: its format is another one.
        """
        return self._open(name, lineage or Lineage.of(self._store))

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot that counts, by its manifest; None if there is none.

        Raises:
            SnapshotDamaged: that manifest, or a lease of the run, has unexpected content.
        """
        lineage = Lineage.of(self._store)
        while names := [name for name, files in self._folders(lineage).items() if _counts(files)]:
            if (snapshot := self._open(names[-1], lineage)) is not None:
                return snapshot  # else a newer one has taken its place meanwhile
        return None

    def newest_readable(self) -> Snapshot | None:
        """Return the newest snapshot that counts and whose manifest is whole; None if there is none."""
        lineage = Lineage.of(self._store)
        return next(self._committed(lineage, dict(reversed(self._folders(lineage).items()))), None)

    def newest_name(self) -> str:
        """Return the name of the newest valid snapshot, damaged or not; "" if there is none."""
        lineage = Lineage.of(self._store)
        return max((name for name, files in self._folders(lineage).items() if _counts(files)), default="")

    def has(self, name: str) -> bool:
        """Return whether `name` was committed, also if it was set aside or is damaged."""
        return MANIFEST in self._folders().get(name, set())

    def newest_good(self, verify: Callable[[Snapshot], None] | None = None) -> Snapshot | None:
        """Return the newest snapshot with verified bytes; set damaged ones aside with a warning.

        Args:
            verify: called instead of the method `verify`, and raises as that does.

        Raises:
            SnapshotUnreadable: no snapshot is good, and some cannot be read: it is unknown whether they are damaged.
                Weights that cannot be read are set aside: a run resumes without them.
        """
        lineage = Lineage.of(self._store)
        unreadable: dict[str, SnapshotUnreadable] = {}
        good = None
        for name, files in reversed(self._folders(lineage).items()):
            try:
                if good := self._verified(name, files, lineage, verify or self.verify):
                    break
            except SnapshotUnreadable as error:
                unreadable[name] = error
            except SnapshotDamaged as error:
                self.set_aside_with_warning(name, str(error))
        if unreadable and good is None and self._folder == SNAPSHOTS:
            raise next(iter(unreadable.values()))
        for name, reason in unreadable.items():
            self.set_aside_with_warning(name, str(reason))
        return good

    def _verified(
        self, name: str, files: Collection[str], lineage: Lineage, verify: Callable[[Snapshot], None]
    ) -> Snapshot | None:
        """Return the snapshot in the folder `name` if it was committed and is whole."""
        if "" in files and parse_name(name):
            self._ensure_folder(name)
        if not _counts(files):
            return None
        try:
            if (snapshot := self._open(name, lineage)) is not None:
                verify(snapshot)
            return snapshot
        except SnapshotMissing:
            return None  # pruned while it was read

    def _ensure_folder(self, name: str) -> None:
        """Raise an error if the path of a snapshot's folder is no folder."""
        path = f"{self._folder}/{name}"
        with contextlib.suppress(FileNotFoundError), self._store.reading(path):
            self._store.list(path)
            self._store.size(path)
            raise SnapshotUnreadable(f"{self._store.url}/{path} cannot be read: it is a file, not a folder")

    def verify(self, snapshot: Snapshot, *, sizes_only: bool = False) -> None:
        """Read every file of `snapshot`, or its size alone, and compare it with the manifest.

        Raises:
            SnapshotDamaged: a file is missing or differs; it is named with both values.
            SnapshotMissing: the snapshot is gone: pruned meanwhile.
        """
        manifest = f"{snapshot.path}/{MANIFEST}"
        verify_files(self._store, manifest, snapshot.manifest["files"], sizes_only=sizes_only)

    def set_aside_with_warning(self, name: str, reason: str) -> None:
        """Set a snapshot aside with a warning, since no run can resume from it."""
        if self._folder == SNAPSHOTS:
            log.warning("snapshot %s is set aside, an older one is taken: %s", name, reason)
        else:
            log.warning("weights %s/%s are set aside, older ones count: %s", self._folder, name, reason)
        try:
            self.set_aside(name, reason)
        except OSError as refused:  # there is no folder, or none that can be written: it is not taken all the same
            log.warning("%s/%s cannot be marked as set aside: %s", self._folder, name, refused)

    def set_aside(self, name: str, reason: str) -> None:
        """Mark the snapshot `name` as unusable; its files stay for inspection."""
        marker = json.dumps({"reason": reason, "time": time.time()}, indent=1)
        self._store.write(f"{self._folder}/{name}/{_ASIDE}", marker.encode())

    def set_aside_reasons(self) -> dict[str, str]:
        """Return why each snapshot was set aside, by name."""
        marked = [name for name, files in self._folders().items() if parse_name(name) and _ASIDE in files]
        return {name: self._reason(name) for name in marked}

    def _reason(self, name: str) -> str:
        path = f"{self._folder}/{name}/{_ASIDE}"
        try:
            return str(decode_object(self._store.read(path), path, reason=str)["reason"])
        except (SnapshotDamaged, OSError) as error:
            return f"its {_ASIDE} does not say why: {error}"

    def discard(self, snapshot: Snapshot) -> None:
        """Remove the files of `snapshot`."""
        # The manifest goes first: a kill in between leaves a snapshot that never happened, not a damaged one.
        self._store.remove_known(snapshot.path, [MANIFEST], [*snapshot.manifest["files"]])

    def sweep(self, last: Snapshot, pinned: Collection[str] = ()) -> None:
        """Remove uncommitted folders before `last`, left by a kill or by an older generation.

        It also removes weights that a superseded generation committed. It keeps those that forks of the `pinned`
        snapshots need.
        """
        folders, lineages = self._folders(), list[Lineage]()
        if self._folder != SNAPSHOTS:
            lineages.append(Lineage.of(self._store))
            try:
                lineages += [Lineage.up_to(self._store, name) for name in pinned]
            except SnapshotDamaged:  # a lease that tells which weights a fork needs: none go
                return
        for name in sorted({*folders, *self._store.unfinished(self._folder)}):
            parsed = parse_name(name)
            if parsed is None or parsed[1] > last.generation:
                continue
            is_held = _ASIDE in folders.get(name, set()) or any(lineage.holds(name) for lineage in lineages)
            if self._folder != SNAPSHOTS and not is_held:
                self._store.remove(f"{self._folder}/{name}")
                continue
            if name >= last.name or {MANIFEST, _ASIDE} & folders.get(name, set()):
                continue
            # A folder that could not be listed seems to be empty.
            if not any(self._has(name, file) for file in (MANIFEST, _ASIDE)):
                self._store.remove(f"{self._folder}/{name}")

    def _has(self, name: str, file: str) -> bool:
        try:
            return self._store.exists(f"{self._folder}/{name}/{file}")
        except NotADirectoryError:  # a file is in the place of the snapshot
            return False

    def _folders(self, lineage: Lineage | None = None) -> dict[str, set[str]]:
        """Return the files of every folder, or of those on the lineage, oldest first.

        Names sort as positions do.
        """
        folders: dict[str, set[str]] = {}
        for path in self._store.find(self._folder):
            name, _, file = path.partition("/")
            file = file.partition("/")[0]  # a folder may lie in the place of a file
            if lineage is None or lineage.holds(name):
                folders.setdefault(name, set()).add(file)
        return dict(sorted(folders.items()))

    def _committed(self, lineage: Lineage, folders: Mapping[str, Collection[str]]) -> Iterator[Snapshot]:
        for name, files in folders.items():
            if not _counts(files):
                continue
            try:
                snapshot = self._open(name, lineage)
            except SnapshotDamaged:
                continue  # the next newest_good sets it aside
            if snapshot is not None:
                yield snapshot

    def _open(self, name: str, lineage: Lineage) -> Snapshot | None:
        """Return the snapshot in the folder `name`; None if it was never committed."""
        path = f"{self._folder}/{name}/{MANIFEST}"
        where = f"{self._store.url}/{path}"
        manifest = _read_manifest(self._store, path)
        if manifest is None:
            return None
        with damaged_on_error(where):
            return self._checked(name, manifest, lineage, where)

    def _checked(self, name: str, manifest: dict[str, Any], lineage: Lineage, where: str) -> Snapshot:
        _check_manifest(manifest, where)
        parsed, of = parse_name(name), (Position(manifest["step"], manifest["after"]), manifest["generation"])
        if parsed is None:
            raise _Foreign(f"{where} lies in a folder whose name is not that of a snapshot")
        expected = inherited_run_id(self._store, f"{self._folder}/{name}") or lineage.run_id
        if expected and manifest.get("run_id") != expected:
            run, run_id = manifest.get("run"), manifest.get("run_id")
            raise _Foreign(f"{where} belongs to another run: {run!r} ({run_id}), this run is {expected}")
        if parsed != of:
            raise _Foreign(f"{where} is the manifest of snapshot {snapshot_name(*of)}, not of {name}")
        if self._folder == SNAPSHOTS and ROWS not in manifest["files"]:
            raise SnapshotDamaged(f"{where} names no {ROWS}")
        return Snapshot(name, *parsed, manifest, self._folder)


def copied_weights(store: Store, path: str) -> Snapshot | None:
    """Return the weights in the folder `path`, also outside of runs; None without a manifest.

    Raises:
        SnapshotDamaged: the manifest has unexpected content.
        SnapshotError: its format is another one.
    """
    where = f"{store.url}/{path}/{MANIFEST}"
    manifest = _read_manifest(store, f"{path}/{MANIFEST}")
    if manifest is None:
        return None
    with damaged_on_error(where):
        _check_manifest(manifest, where)
        position = Position(manifest["step"], manifest["after"])
        return Snapshot(path, position, manifest["generation"], manifest, folder="")


def _read_manifest(store: Store, path: str) -> dict[str, Any] | None:
    try:
        return read_document(store, path, **_KINDS)
    except FileNotFoundError:
        return None


def _check_manifest(manifest: dict[str, Any], where: str) -> None:
    if manifest["format"] != FORMAT:
        raise SnapshotError(
            f"{where} has format {manifest['format']}, this version reads {FORMAT}. "
            "Resume with the version that wrote it."
        )
    check_kinds(manifest["facts"], f"{where}: facts", **_FACTS)
    check_kinds(manifest["facts"].get("progress", {}), f"{where}: progress", step=int, epoch=int, finished=bool)
    metrics = manifest["facts"].get("metrics", {})
    check_kinds(metrics, f"{where}: metrics", **dict.fromkeys(metrics, NUMBER))
    check_files(manifest, where)
    sizes([manifest["world_size"]])


def _counts(files: Collection[str]) -> bool:
    """Whether a folder with these files holds a committed snapshot that was not set aside."""
    return MANIFEST in files and _ASIDE not in files


class SnapshotCatalog(Catalog):
    """The snapshots of the run in `store`, with their rows of the metric log."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._metric_segments = MetricSegments(store.own if isinstance(store, ForkedStore) else store)

    def rows(self, faults: list[str] | None = None) -> list[str]:
        """Return the segments of the metric log up to the newest snapshot that counts, oldest first.

        Args:
            faults: gets messages on why segments are not among them.

        Raises:
            SnapshotDamaged: a segment has unexpected content, and `faults` is None.
        """
        return [*self.segments(faults).values()]

    def segments(self, faults: list[str] | None = None, after: str = "") -> dict[str, str]:
        """Return the segments by snapshot name, of names that sort after `after`; as `rows` does."""
        segments, gaps, _ = self._read_segments(after)
        if faults is None and gaps:
            raise SnapshotDamaged(f"{gaps[0]}: the metric log would have a gap")
        if faults is not None:
            faults += gaps
        return segments

    def _read_segments(self, after: str = "") -> tuple[dict[str, str], list[str], dict[str, SnapshotDamaged]]:
        """Return segments, messages on lost ones, and the damage of snapshots that count, by name."""
        lineage = Lineage.of(self._store)
        folders = {name: files for name, files in self._folders(lineage).items() if name > after}
        committed = {snapshot.name: snapshot for snapshot in self._committed(lineage, folders)}
        end = max(committed, default="")
        removed, gaps = self._removed_segments(after)
        segments = {name: rows for name, rows in removed.items() if lineage.holds(name)}
        damaged: dict[str, SnapshotDamaged] = {}
        for name, files in folders.items():
            if name > end or MANIFEST not in files or name in segments:
                continue
            try:  # also of one set aside: its share of the log may be whole
                if snapshot := committed.get(name) or self._open(name, lineage):
                    segments[name] = self._rows_of(snapshot)
            except SnapshotDamaged as error:
                if not isinstance(error, _Foreign):
                    gaps.append(str(error))
                if _counts(files):
                    damaged[name] = error
        return {name: segments[name] for name in sorted(segments) if name <= end}, gaps, damaged

    def _removed_segments(self, after: str) -> tuple[dict[str, str], list[str]]:
        """Return the rows of removed snapshots, with a parent's, and messages on damaged files."""
        rows, damages = self._metric_segments.read(after)
        if not isinstance(self._store, ForkedStore):
            return rows, damages
        theirs, more = SnapshotCatalog(self._store.origin)._removed_segments(after)
        inherited = {name: text for name, text in theirs.items() if self._store.inherits(f"{SNAPSHOTS}/{name}")}
        return {**inherited, **rows}, [*damages, *more]

    def log_faults(self) -> list[str]:
        """Return messages about damaged segments of the metric log, and about steps without a row."""
        faults: list[str] = []
        return self._log_faults(self.rows(faults), faults)

    def _log_faults(self, rows: list[str], faults: list[str]) -> list[str]:
        newest = self.newest_readable()
        steps = newest.position.step - 1 if newest else 0  # the row of the last step may be open
        gaps = [f"{first} to {last}" if last > first else str(first) for first, last in missing_steps(rows, steps)]
        return [*faults, *([f"the metric log has no rows of steps {', '.join(gaps)}"] if gaps else [])]

    def metric_log(self) -> str:
        """Return the text of the run's `metrics.csv`: the rows of all valid snapshots.

        If rows are lost and the present file has them besides all others, its text is returned.
        """
        faults: list[str] = []
        rows = self.rows(faults)
        text = join_segments(rows)
        if self._log_faults(rows, faults) and self._store.exists(ROWS):
            present = self._store.read(ROWS).decode(errors="replace")
            if {*text.splitlines()} <= {*present.splitlines()}:
                return present
        return text

    def set_damaged_aside(self, before: Snapshot) -> list[str]:
        """Set aside older snapshots with a damaged manifest or rows, so that others can be removed.

        Returns what `log_faults` would: everything is read once for both.
        """
        segments, gaps, damaged = self._read_segments()
        for name, error in damaged.items():
            if name < before.name:
                log.warning("snapshot %s is set aside: %s", name, error)
                self.set_aside(name, str(error))
        return self._log_faults([*segments.values()], gaps)

    def prune(
        self, keep: int, also: Collection[str] = (), pins: Callable[[], Collection[str]] = tuple[str]
    ) -> list[str]:
        """Remove valid snapshots except the newest `keep`, `also` and `pins`; return the removed.

        Their metric rows move to a file of their own first. Uncommitted folders are swept as well, once no attempt can
        commit them; snapshots that were set aside stay, and so do those of a parent.
        """
        committed = self.snapshots()
        older = committed[: max(0, len(committed) - keep)]
        old = [one for one in older if one.name not in also and not inherits(self._store, one.path)]
        removed = self.remove(*old, pins=pins)
        if committed:
            self.sweep(committed[-1])
        return [snapshot.name for snapshot in removed]

    def remove(
        self,
        *snapshots: Snapshot,
        rows: Mapping[str, str] = MappingProxyType({}),
        pins: Callable[[], Collection[str]] = tuple[str],
    ) -> list[Snapshot]:
        """Remove snapshots, but those that forks have pinned; return the removed.

        Their metric rows move to files of their own first, which tells forks that a snapshot is about to go. Pins are
        read after that: a fork writes its pin before it looks for that file, so one of the two sees the other. A
        snapshot with damaged rows is set aside instead.

        Args:
            snapshots: to remove.
            rows: of the metric log, by the name of their snapshot; others are read.
            pins: returns the names of the snapshots that forks start from.
        """
        segments = self._metric_segments
        announced = {one.name: file for one in snapshots if (file := self._announce(one, rows.get(one.name)))}
        pinned = pins() if announced else ()
        for snapshot in snapshots:
            if snapshot.name in pinned and snapshot.name in announced:
                segments.take_back(announced[snapshot.name])
            elif snapshot.name in announced:
                self.discard(snapshot)
        if announced:
            segments.fold()
        return [one for one in snapshots if one.name not in pinned or one.name not in announced]

    def _announce(self, snapshot: Snapshot, rows: str | None) -> str:
        """Write the rows of a snapshot to a file, and return its name; "" if they are damaged."""
        try:
            rows = self._rows_of(snapshot) if rows is None else rows
        except SnapshotDamaged as error:
            log.warning("snapshot %s is set aside instead of removed: %s", snapshot.name, error)
            self.set_aside(snapshot.name, str(error))
            return ""
        return self._metric_segments.write(snapshot.name, rows)

    def is_about_to_go(self, snapshot: Snapshot) -> bool:
        """Return whether the removal of `snapshot` has started, or was interrupted by a kill."""
        return self._metric_segments.has(snapshot.name)

    def _rows_of(self, snapshot: Snapshot) -> str:
        path = f"{snapshot.path}/{ROWS}"
        return read_verified(self._store, path, snapshot.manifest["files"][ROWS]).decode()


class _Foreign(SnapshotDamaged):
    """A folder that holds a snapshot of another run, or of another position."""
