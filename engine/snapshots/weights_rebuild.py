"""Weights made anew from a snapshot that holds the same state.

The end of a run is one state, in its last snapshot and in `last`. Weights in `best` can differ from a snapshot of the
same step, since user code runs between the two: they are made anew where a file or a checksum that is left agrees.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.catalog import MANIFEST, Catalog, Snapshot
from midstride.engine.snapshots.committer import file_contents, manifest_of
from midstride.engine.snapshots.lease import read_lease
from midstride.engine.snapshots.position import Position, file_stem, parse_name
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.state_copy import StateCopier
from midstride.engine.snapshots.weights import is_of_the_end
from midstride.engine.state.row_shards import RowShard, join_rows
from midstride.engine.storage.checksums import FileDigest, digest_of, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.world import World

__all__ = ["NotRebuilt", "rebuild", "weights_in"]


class NotRebuilt(SnapshotError):
    """A snapshot does not hold the wanted weights, or no rank holds all of them."""


def rebuild(store: Store, folder: str, name: str, snapshot: Snapshot) -> Callable[[], None]:
    """Return a function that writes the weights in `folder` called `name` anew, from `snapshot`.

    Raises:
        NotRebuilt: why it cannot be done.
    """
    position, generation = _check_position(folder, name, snapshot)
    saved = _saved(store, folder, name)
    facts = saved.manifest["facts"] if saved else snapshot.manifest["facts"]["weights_facts"].get(folder)
    if facts is None:
        raise NotRebuilt(f"snapshot {snapshot.name} names no weights in {folder}")
    state = StateCopier(World(), lambda path: False).copy(weights_in(store, snapshot), Buffer())
    files = file_contents(file_stem(False, 0, 1), state)
    digests = {file: digest_of([data]) for file, data in files}
    tensors = files[0][0]
    _check_bits(store, f"{folder}/{name}/{tensors}", digests[tensors], saved)
    lease = read_lease(store, generation)
    manifest = encode_document(manifest_of(snapshot.manifest["run"], lease, position, 1, digests, facts))

    def act() -> None:
        store.remove(f"{folder}/{name}")
        store.write_all(f"{folder}/{name}", files)
        store.write(f"{folder}/{name}/{MANIFEST}", manifest)

    return act


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
    """Return the weights called `name` by their manifest; None if that is gone or damaged."""
    try:
        return Catalog(store, folder).get(name)
    except SnapshotDamaged:
        return None


def weights_in(store: Store, snapshot: Snapshot) -> dict[str, Any]:
    """Return the whole weights given to `snapshot` by the ranks, without metrics' states.

    Raises:
        NotRebuilt: no rank has all of them.
    """
    strategy = snapshot.manifest["facts"].get("identity", {}).get("strategy", "")
    row = STRATEGIES.get(strategy.partition("(")[0])
    tree = read(store, snapshot, 0)
    others = (read(store, snapshot, rank) for rank in range(1, snapshot.manifest["world_size"]))
    if any(isinstance(value, RowShard) for value in tree["module"].values()):
        tree["module"] = _joined([tree["module"], *(other["module"] for other in others)])
    elif "stages" in tree.get("strategy", {}):
        tree["module"] = _of_stages(tree, others)
    elif row is None or row.shards_weights:
        raise NotRebuilt(f"under strategy {strategy} a rank may have but a part of the weights")
    metrics = tree.get("metrics", {}).get("metrics", {})
    seen = {f"{path}.{name}" if path else name for path, metric in metrics.items() for name in metric["states"]}
    return {name: value for name, value in tree["module"].items() if name not in seen}


def _of_stages(tree: dict[str, Any], others: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the layers of all pipeline stages.

    Rank 0 has the last stage, the ranks of others follow.
    """
    whole = dict(tree["module"])
    for rank in islice(others, tree["strategy"]["stages"] - 1):
        own = rank["module"].items()
        whole |= {name: t for name, t in own if name.startswith("sequential_module.") and isinstance(t, Tensor)}
    return whole


def _joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole of what each of `ranks` has some rows of; what names share stays shared."""
    whole: dict[int, Any] = {}

    def of(name: str) -> Any:
        value = ranks[0][name]
        if not isinstance(value, RowShard):
            return value
        key = id(value.rows)
        if key not in whole:
            whole[key] = join_rows([rank[name] for rank in ranks])
        return whole[key]

    return {name: of(name) for name in ranks[0]}


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
