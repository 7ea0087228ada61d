"""Rebuilds weights from a snapshot that holds the same state.

The end of a run is one state, in its last snapshot and in `last`. Weights in `best` can differ from a snapshot of the
same step, since user code runs between the two: they are made anew where a file or a checksum that is left agrees.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.catalog import MANIFEST, Catalog, Snapshot
from midstride.engine.snapshots.committer import file_contents, manifest_of
from midstride.engine.snapshots.lease import read_lease
from midstride.engine.snapshots.position import Position, file_stem, parse_name
from midstride.engine.snapshots.reader import SnapshotReader, read_whole
from midstride.engine.snapshots.state_copy import StateCopier
from midstride.engine.snapshots.weights import is_of_the_end
from midstride.engine.state.row_shards import RowShard, no_rows, whole_tensor
from midstride.engine.storage.checksums import FileDigest, digest_of, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.world import World

__all__ = ["NotRebuilt", "rebuild", "weights_in"]


class NotRebuilt(SnapshotError):
    """A snapshot does not hold the wanted weights, or no rank holds all of them."""


def rebuild(store: Store, folder: str, name: str, snapshot: Snapshot) -> Callable[[], None]:
    """Return a function that rebuilds the weights `name` in `folder` from `snapshot`.

    Raises:
        NotRebuilt: why it cannot be done.
    """
    position, generation = _check_position(folder, name, snapshot)
    saved = _saved(store, folder, name)
    facts = saved.manifest["facts"] if saved else snapshot.manifest["facts"]["weights_facts"].get(folder)
    if facts is None:
        raise NotRebuilt(f"snapshot {snapshot.name} names no weights in {folder}")
    whole = weights_in(store, snapshot)
    kept = facts.get("kept", whole)
    parts = _parts({name: whole[name] for name in whole if name in kept}, store, snapshot)
    files = [pair for rank, part in enumerate(parts) for pair in _files(part, rank, len(parts))]
    digests = {file: digest_of([data]) for file, data in files}
    for tensors in (file for file in digests if file.endswith(".safetensors")):
        _check_bits(store, f"{folder}/{name}/{tensors}", digests[tensors], saved)
    lease = read_lease(store, generation)
    manifest = encode_document(manifest_of(snapshot.manifest["run"], lease, position, len(parts), digests, facts))

    def act() -> None:
        store.remove(f"{folder}/{name}")
        store.write_all(f"{folder}/{name}", files)
        store.write(f"{folder}/{name}/{MANIFEST}", manifest)

    return act


def _parts(weights: dict[str, Any], store: Store, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the part of the whole `weights` that each rank wrote."""
    reader = SnapshotReader(store, snapshot)
    for rank in range(reader.world_size):
        reader.plan(rank, ("module",))
    reader.read()
    trees = [tree["module"] for tree in reader.trees()]
    rows = [{name: value for name, value in tree.items() if isinstance(value, RowShard)} for tree in trees]
    if not rows[0]:
        return [weights]
    places = [{name: (shard.start, len(shard.rows)) for name, shard in own.items()} for own in rows]
    again = [rank for rank in range(1, len(rows)) if places[rank] == places[0]]  # where the second replica begins
    for own in rows[again[0] :] if again else ():
        own.update({name: no_rows(shard) for name, shard in own.items()})
    return [
        {name: own.get(name, value) for name, value in weights.items() if rank == 0 or name in own}
        for rank, own in enumerate(rows)
    ]


def _files(part: dict[str, Any], rank: int, size: int) -> list[tuple[str, bytes | memoryview]]:
    """Return name and content of the files with the weights that `rank` wrote."""
    return file_contents(file_stem(False, rank, size), StateCopier(World(), lambda path: False).copy(part, Buffer()))


def _check_position(folder: str, name: str, snapshot: Snapshot) -> tuple[Position, int]:
    """Return position and generation of weights.

    Raises:
        NotRebuilt: they are of another step than `snapshot`, or the last ones of a run that has not ended.
    """
    parsed = parse_name(name)
    if parsed is None:
        raise NotRebuilt(f"{name} is not the name of weights")
    if folder == "last" and not is_of_the_end(snapshot):
        raise NotRebuilt(f"the newest good snapshot, {snapshot.name}, is not of the end of the run")
    same = parsed[0] == snapshot.position if folder == "last" else parsed[0].step == snapshot.position.step
    if not same:
        raise NotRebuilt(
            f"they are of step {parsed[0].step}, and the newest good snapshot, {snapshot.name}, is of another state"
        )
    return parsed


def _saved(store: Store, folder: str, name: str) -> Snapshot | None:
    """Return the weights called `name` by their manifest; None if it is missing or damaged."""
    try:
        return Catalog(store, folder).get(name)
    except SnapshotDamaged:
        return None


def weights_in(store: Store, snapshot: Snapshot) -> dict[str, Any]:
    """Return the whole weights that the ranks wrote to `snapshot`, without metrics' states.

    Raises:
        NotRebuilt: no rank has all of them.
    """
    strategy = snapshot.manifest["facts"].get("identity", {}).get("strategy", "")
    row = STRATEGIES.get(strategy.partition("(")[0])
    tree, *others = read_whole(store, snapshot, "module", "metrics", "strategy")
    is_sharded = any(isinstance(value, RowShard) for value in tree["module"].values())
    if "stages" in tree.get("strategy", {}) and not is_sharded:
        tree["module"] = _of_stages(tree, others)
    elif not is_sharded and (row is None or row.shards_weights):
        raise NotRebuilt(f"under strategy {strategy} a rank can have only a part of the weights")
    metrics = tree.get("metrics", {}).get("metrics", {})
    seen = {f"{path}.{name}" if path else name for path, metric in metrics.items() for name in metric["states"]}
    return {name: whole_tensor(value) for name, value in tree["module"].items() if name not in seen}


def _of_stages(tree: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the layers of all pipeline stages.

    Rank 0 has the last stage, the ranks of others follow.
    """
    whole = dict(tree["module"])
    for rank in others[: tree["strategy"]["stages"] - 1]:
        own = rank["module"].items()
        whole |= {name: t for name, t in own if name.startswith("sequential_module.") and isinstance(t, Tensor)}
    return whole


def _check_bits(store: Store, path: str, found: FileDigest, saved: Snapshot | None) -> None:
    """Compare rebuilt tensors with the lost ones at `path`: their manifest, else their file.

    `last` is known to hold the state of the last snapshot. So it is compared with its manifest alone.

    Raises:
        NotRebuilt: they differ, or there is nothing to compare with.
    """
    folder, _, name = path.split("/")
    if saved is not None:
        left = saved.manifest["files"].get(name)
    elif folder == "last":
        return
    else:
        left = digest_of(store.stream(path)) if store.exists(path) else None
    if left is None:
        raise NotRebuilt("nothing is left of them that a snapshot of the same step could be compared with")
    if found != left:
        raise NotRebuilt("the newest good snapshot holds other weights at their step")
