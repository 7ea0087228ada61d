"""The reader: one rank's tree out of one snapshot."""

import json
from collections.abc import Collection
from typing import Any

from midstride.engine.errors import SnapshotError
from midstride.engine.snapshots.catalog import SNAPSHOTS, Snapshot
from midstride.engine.snapshots.position import rank_stem
from midstride.engine.snapshots.verification import read_verified
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.state.codec import decode
from midstride.engine.state.tensor_file import read_tensors
from midstride.engine.state.tensors import FreshTensors
from midstride.engine.storage.store import Store

__all__ = ["read", "read_part"]


def read(store: Store, snapshot: Snapshot, rank: int) -> Any:
    """Return the tree that `rank` gave to `snapshot`; every file it needs is checked before a bit of it is used.

    Raises:
        SnapshotDamaged: a file is missing or differs from the manifest.
        SnapshotError: the snapshot was taken by fewer ranks.
    """
    size = snapshot.manifest["world_size"]
    if rank >= size:
        raise SnapshotError(f"snapshot {snapshot.name} was taken by {size} ranks, it has no files of rank {rank}")
    own = rank_stem(rank, size)
    with damaged_on_error(f"{store.url}/{SNAPSHOTS}/{snapshot.name}/{own}.json"):
        document = _document(store, snapshot, rank)
        tensors = _tensors(store, snapshot, f"{own}.safetensors")
        for stem, names in document["elsewhere"].items():
            tensors.update(_tensors(store, snapshot, f"{stem}.safetensors", {*names}))
        return decode(document["tree"], tensors)


def read_part(store: Store, snapshot: Snapshot, rank: int, name: str) -> Any:
    """Return one part of that tree, of those that hold no tensors; no tensor is read.

    Raises:
        SnapshotDamaged: the file it stands in is missing or differs from the manifest.
        SnapshotError: the snapshot has no such part: another version took it.
    """
    with damaged_on_error(f"{store.url}/{SNAPSHOTS}/{snapshot.name}"):
        document = _document(store, snapshot, rank)
        if name not in document["tree"]:
            raise SnapshotError(
                f"snapshot {snapshot.name} of {store.url} has no part {name!r}: another version took it"
            )
        return decode({name: document["tree"][name]}, {})[name]


def _document(store: Store, snapshot: Snapshot, rank: int) -> dict[str, Any]:
    name = f"{rank_stem(rank, snapshot.manifest['world_size'])}.json"
    document: dict[str, Any] = json.loads(_file(store, snapshot, name))
    return document


def _tensors(store: Store, snapshot: Snapshot, name: str, only: Collection[str] | None = None) -> FreshTensors:
    return read_tensors(store, f"{SNAPSHOTS}/{snapshot.name}/{name}", snapshot.manifest["files"][name], only)


def _file(store: Store, snapshot: Snapshot, name: str) -> bytes:
    path = f"{SNAPSHOTS}/{snapshot.name}/{name}"
    return read_verified(store, path, snapshot.manifest["files"][name])
