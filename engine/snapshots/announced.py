"""Inspection: whether snapshots that were announced are there, by their manifests and sizes. Needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.snapshots.catalog import MANIFEST, SNAPSHOTS, History, Snapshot
from midstride.engine.storage.store import Store

__all__ = ["inspect_snapshots"]


def inspect_snapshots(url: str, announced: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the snapshots `announced` for the run at `url`, each with what was found there as "state".

    Its bytes are not read: that is for `History.verify`. One that is gone was pruned after a newer one.

    Raises:
        SnapshotDamaged: a file is missing or has another size than its manifest says.
    """
    store = Store.open(url)
    committed = {snapshot.name: snapshot for snapshot in History(store).snapshots()}
    return [{**one, "state": _state(store, committed.get(one["name"]))} for one in announced]


def _state(store: Store, snapshot: Snapshot | None) -> str:
    if snapshot is None:
        return "pruned"
    for name, expected in snapshot.manifest["files"].items():
        path = f"{SNAPSHOTS}/{snapshot.name}/{name}"
        try:
            found = f"has {store.size(path)} bytes"
        except FileNotFoundError:
            found = "is missing"
        if found != f"has {expected['bytes']} bytes":
            if not store.exists(f"{SNAPSHOTS}/{snapshot.name}/{MANIFEST}"):
                return "pruned"
            raise SnapshotDamaged(f"{store.url}/{path} {found}, its manifest says {expected['bytes']} bytes")
    return f"{len(snapshot.manifest['files'])} files, sizes right"
