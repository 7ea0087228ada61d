"""The reader: one rank's tree out of a snapshot, and the weights of a run or of a snapshot."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midstride.engine.errors import SnapshotDamaged, SnapshotError, SnapshotMissing
from midstride.engine.snapshots.catalog import MANIFEST, SNAPSHOTS, Catalog, Snapshot, copied_weights
from midstride.engine.snapshots.parent import open_run, with_parent
from midstride.engine.snapshots.position import parse_name
from midstride.engine.snapshots.weights import error_with_remedy, newest_weights
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.state.codec import decode
from midstride.engine.state.row_shards import RowShard, join_rows
from midstride.engine.state.tensor_file import read_tensors
from midstride.engine.state.tensors import FreshTensors
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_verified

__all__ = ["Weights", "load_weights", "read", "read_part", "weights_at"]


def read(store: Store, snapshot: Snapshot, rank: int) -> Any:
    """Return the tree that `rank` gave to `snapshot`, from verified files.

    Raises:
        SnapshotDamaged: a file is missing or differs from the manifest.
        SnapshotError: the snapshot was taken by fewer ranks.
    """
    size = snapshot.manifest["world_size"]
    if rank >= size:
        raise SnapshotError(f"snapshot {snapshot.name} was taken by {size} ranks, it has no files of rank {rank}")
    own = snapshot.stem(rank)
    with damaged_on_error(f"{store.url}/{snapshot.path}/{own}.json"):
        document = _document(store, snapshot, rank)
        tensors = _tensors(store, snapshot, f"{own}.safetensors")
        for stem, names in document["elsewhere"].items():
            tensors.update(_tensors(store, snapshot, f"{stem}.safetensors", {*names}))
        return decode(document["tree"], tensors)


def read_part(store: Store, snapshot: Snapshot, rank: int, name: str) -> Any:
    """Return the part `name` of that tree, which must hold no tensors; no tensor is read.

    Raises:
        SnapshotDamaged: its file is missing or differs from the manifest, or the snapshot has no such part.
    """
    with damaged_on_error(f"{store.url}/{snapshot.path}"):
        document = _document(store, snapshot, rank)
        return decode({name: document["tree"][name]}, {})[name]


def _document(store: Store, snapshot: Snapshot, rank: int) -> dict[str, Any]:
    name = f"{snapshot.stem(rank)}.json"
    data = read_verified(store, f"{snapshot.path}/{name}", snapshot.manifest["files"][name])
    document: dict[str, Any] = json.loads(data)
    return document


def _tensors(store: Store, snapshot: Snapshot, name: str, only: Collection[str] | None = None) -> FreshTensors:
    return read_tensors(store, f"{snapshot.path}/{name}", snapshot.manifest["files"][name], only)


@dataclass(frozen=True)
class Weights:
    """A module's state_dict, and the facts in its manifest, such as the metrics it reached."""

    state_dict: dict[str, Any]
    facts: dict[str, Any]


@error_with_remedy()
def load_weights(store: Store, folder: str) -> Weights:
    """Return the weights in `folder` ("best" or "last") that count.

    Raises:
        SnapshotMissing: none were saved.
        SnapshotDamaged: a file is missing or differs from the manifest.
    """
    while (saved := newest_weights(store, folder)) is not None:
        try:
            return Weights(read(store, saved, 0), saved.manifest["facts"])
        except SnapshotDamaged:
            if store.exists(f"{saved.path}/{MANIFEST}"):
                raise  # else newer ones took their place meanwhile
    raise SnapshotMissing(f"no weights were saved in {store.url}/{folder}")


def weights_at(path: str | os.PathLike[str]) -> Weights:
    """Return the weights at `path`.

    Args:
        path: folder or URL: a run's `best` or `last`, one of the weights in it, a copy of one, or a snapshot. Or a
            file that `save_checkpoint` wrote.

    Raises:
        SnapshotMissing: none were saved there.
        SnapshotDamaged: a file is missing or differs from its manifest, or is no checkpoint.
    """
    path = os.fspath(path)
    if Path(path).is_file():
        return _of_checkpoint(path)
    url, _, folder = path.rstrip("/").rpartition("/")
    if url.endswith(f"/{SNAPSHOTS}") and parse_name(folder):
        return _of_snapshot(open_run(url.removesuffix(f"/{SNAPSHOTS}")), folder)
    store = Store.open(url or ".")
    if (copy := copied_weights(store, folder)) is not None:
        return Weights(read(store, copy, 0), copy.manifest["facts"])
    return load_weights(with_parent(store), folder)


def _of_snapshot(store: Store, name: str) -> Weights:
    """Return the weights in the snapshot called `name`, put together from its ranks."""
    snapshot = Catalog(store).get(name)
    if snapshot is None:
        raise SnapshotMissing(f"{store.url}/{SNAPSHOTS}/{name} is no committed snapshot, or was removed meanwhile")
    states = [read(store, snapshot, 0)["module"]]
    strategy = str(snapshot.manifest["facts"].get("identity", {}).get("strategy"))
    if strategy.startswith("pipeline") or any(isinstance(value, RowShard) for value in states[0].values()):
        states += [read(store, snapshot, rank)["module"] for rank in range(1, snapshot.manifest["world_size"])]
    return Weights(_joined(states), {"step": snapshot.position.step})


def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole state_dict of which each rank has rows, or layers."""
    named: dict[str, list[Any]] = {}
    for state in states:
        for name, value in state.items():
            named.setdefault(name, []).append(value)
    return {name: join_rows(held) if isinstance(held[0], RowShard) else held[0] for name, held in named.items()}


def _of_checkpoint(path: str) -> Weights:
    """Return the weights in a file of Lightning's format; loading it executes nothing."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SnapshotDamaged(
            f"{path} is damaged, or no file of tensors and plain values alone. If you trust who wrote it, load the "
            f'weights yourself: module.load_state_dict(torch.load("{path}", weights_only=False)["state_dict"])'
        ) from error
    if not isinstance(found, Mapping) or "state_dict" not in found:
        raise SnapshotDamaged(f"{path} has no state_dict in it: a file that trainer.save_checkpoint wrote has one")
    return Weights(found["state_dict"], {"hparams": dict(found.get("hyper_parameters", {}))})
