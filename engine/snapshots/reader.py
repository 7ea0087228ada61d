"""The reader: one rank's tree out of one snapshot."""

import json
from typing import Any

from safetensors.torch import load
from torch import Tensor

from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.snapshots.checksums import check_facts, facts_of
from midstride.engine.snapshots.codec import decode
from midstride.engine.snapshots.history import SNAPSHOTS, Snapshot
from midstride.engine.snapshots.place import part_name
from midstride.engine.snapshots.store import Store

__all__ = ["read", "read_part"]


def read(store: Store, snapshot: Snapshot, rank: int) -> Any:
    """Return the tree that `rank` gave to `snapshot`; every file it needs is checked before a bit of it is used.

    Raises:
        SnapshotDamaged: a file is missing or differs from the manifest.
        SnapshotError: the snapshot was taken by fewer ranks.
    """
    size = snapshot.manifest["world_size"]
    if rank >= size:
        raise SnapshotError(f"snapshot {snapshot.name} was taken by {size} ranks, it has no part for rank {rank}")
    own = part_name(rank, size)
    part = json.loads(_file(store, snapshot, f"{own}.json"))
    tensors = _tensors(store, snapshot, f"{own}.safetensors")
    for stem, names in part["elsewhere"].items():
        dealt = _tensors(store, snapshot, f"{stem}.safetensors")
        tensors.update({name: dealt[name] for name in names})
    return decode(part["tree"], tensors)


def read_part(store: Store, snapshot: Snapshot, rank: int, name: str) -> Any:
    """Return one part of that tree, of those that hold no tensors; no tensor is read.

    Raises:
        SnapshotDamaged: the file it stands in is missing or differs from the manifest.
        SnapshotError: the snapshot has no such part: another version took it.
    """
    tree = json.loads(_file(store, snapshot, f"{part_name(rank, snapshot.manifest['world_size'])}.json"))["tree"]
    if name not in tree:
        raise SnapshotError(f"snapshot {snapshot.name} of {store.url} has no part {name!r}: another version took it")
    return decode(tree[name], {})


def _tensors(store: Store, snapshot: Snapshot, name: str) -> dict[str, Tensor]:
    return load(_file(store, snapshot, name))


def _file(store: Store, snapshot: Snapshot, name: str) -> bytes:
    path = f"{SNAPSHOTS}/{snapshot.name}/{name}"
    expected = snapshot.manifest["files"][name]
    try:
        data = store.read(path)
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{store.url}/{path} is missing, its manifest says {expected['bytes']} bytes") from error
    check_facts(f"{store.url}/{path}", expected, facts_of([data]))
    return data
