"""Inspection: everything in the store of a run, and its faults. Needs no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from midstride.engine.errors import SnapshotDamaged, SnapshotError, SnapshotMissing
from midstride.engine.snapshots.catalog import MANIFEST, SNAPSHOTS, WEIGHTS, Catalog, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import leases
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.position import parse_name
from midstride.engine.snapshots.weights import error_with_remedy, last_is_missing, missing_weights, newest_weights
from midstride.engine.storage.checksums import FileDigest
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import verify_files

__all__ = ["Finding", "check_announced", "inspect_run"]

State = Literal["committed", "verified", "damaged", "set aside", "not committed", "superseded"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Args:
        name: a snapshot's, or "lease", "metrics", "best", "last".
        state: whether it counts; "not committed" never happened, "superseded" is of a generation that lost its run.
        reason: why it is damaged or was set aside.
        snapshot: if it could be opened.
    """

    name: str
    state: State
    reason: str = ""
    snapshot: Snapshot | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing needs to be done about it."""
        return self.state != "damaged"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        taken = self.snapshot
        described = taken and {
            "step": taken.position.step,
            "generation": taken.generation,
            "bytes": taken.bytes,
            "time": taken.manifest["time"],
        }
        return {"name": self.name, "state": self.state, "reason": self.reason, **(described or {})}


def inspect_run(store: Store, *, read: bool = False) -> list[Finding]:
    """Return the contents of the run in `store`, snapshots first, by position.

    Args:
        store: of the run.
        read: read every byte of what counts, of the weights and of the metric log too; else manifests only.
    """
    try:
        if read:
            leases(store)
        lineage = Lineage.of(store)
    except SnapshotDamaged as error:
        return [Finding("lease", "damaged", str(error))]
    catalog = SnapshotCatalog(store)
    aside = catalog.set_aside_reasons()
    names = sorted({name for name in (*store.list(SNAPSHOTS), *store.unfinished(SNAPSHOTS)) if parse_name(name)})
    findings = [_snapshot(catalog, name, lineage, aside, read) for name in names if _has_files(store, name)]
    if read:
        findings += [Finding("metrics", "damaged", fault) for fault in catalog.log_faults()]
        if newest := catalog.newest_readable():
            missing = missing_weights(store, newest).values()
            findings += [Finding("weights", "damaged", fault) for fault in missing]
            if fault := last_is_missing(store, newest):
                findings.append(Finding("last", "damaged", f"{fault}; `midstride snapshots repair` rebuilds them"))
        for folder in WEIGHTS:
            findings += _damages(folder, lambda folder=folder: _verify_weights(store, folder))  # type: ignore[misc]
    return findings


def _has_files(store: Store, name: str) -> bool:
    path = f"{SNAPSHOTS}/{name}"
    return bool(store.list(path)) or name in store.unfinished(SNAPSHOTS)


def _snapshot(catalog: SnapshotCatalog, name: str, lineage: Lineage, aside: dict[str, str], read: bool) -> Finding:
    if name in aside:
        return Finding(name, "set aside", aside[name])
    if not lineage.holds(name):
        return Finding(name, "superseded")
    snapshot = None
    try:
        snapshot = catalog.get(name, lineage)
        if snapshot is None:
            return Finding(name, "not committed")
        if read:
            catalog.verify(snapshot)
    except SnapshotMissing:
        return Finding(name, "not committed")  # pruned while it was read
    except SnapshotError as error:
        return Finding(name, "damaged", str(error), snapshot)
    return Finding(name, "verified" if read else "committed", snapshot=snapshot)


def _damages(name: str, act: Callable[[], object]) -> Iterator[Finding]:
    try:
        act()
    except SnapshotDamaged as error:
        yield Finding(name, "damaged", str(error))


@error_with_remedy()
def _verify_weights(store: Store, folder: str) -> None:
    with suppress(SnapshotMissing):  # newer ones took their place meanwhile
        if saved := newest_weights(store, folder):
            Catalog(store, folder).verify(saved)


def check_announced(url: str, announced: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the snapshots `announced` for the run at `url`, each with its present "state".

    Manifests and sizes are compared, no bytes. A snapshot that is gone was pruned after a newer one.

    Raises:
        SnapshotDamaged: a file is missing or has another size than its manifest says.
    """
    store = Store.open(url)
    committed = {snapshot.name: snapshot.manifest["files"] for snapshot in SnapshotCatalog(store).snapshots()}
    return [{**one, "state": _announced_state(store, one["name"], committed.get(one["name"]))} for one in announced]


def _announced_state(store: Store, name: str, files: Mapping[str, FileDigest] | None) -> str:
    if files is None:
        return "pruned"
    try:
        verify_files(store, f"{SNAPSHOTS}/{name}/{MANIFEST}", files, sizes_only=True)
    except SnapshotMissing:
        return "pruned"
    return f"{len(files)} files, sizes right"
