"""Weights made anew from a snapshot that holds the same state.

The end of a run is one state, in its last snapshot and in `last`. What `best` holds may differ from a snapshot of the
same step, since code of the user's runs between them: it is made anew where a checksum that is left of it agrees.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.catalog import Snapshot
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.position import parse_name
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.staging import Stager
from midstride.engine.snapshots.weights import StagedWeights
from midstride.engine.snapshots.weights_index import ASIDE, SavedWeights, is_of_the_end, open_weights
from midstride.engine.state.row_shards import RowShard, join_rows
from midstride.engine.storage.checksums import digest_of
from midstride.engine.storage.store import Store
from midstride.engine.world import World

__all__ = ["NotRebuilt", "rebuild"]


class NotRebuilt(SnapshotError):
    """A snapshot does not hold the weights that are wanted, or not in one place."""


def rebuild(store: Store, folder: str, name: str, snapshot: Snapshot) -> Callable[[], None]:
    """Return what writes the weights in `folder` called `name` anew, from `snapshot`. Nothing is written before.

    Raises:
        NotRebuilt: why it cannot be.
    """
    _check_position(folder, name, snapshot)
    saved = _saved(store, folder, name)
    facts = (
        snapshot.manifest["facts"].get("weights_facts", {}).get(folder) if saved is None else saved.manifest["facts"]
    )
    if facts is None:
        raise NotRebuilt(
            f"snapshot {snapshot.name} does not tell what is noted beside weights: an older version took it"
        )
    metrics = facts.get("metrics", {}) if saved is None else saved.manifest["metrics"]
    noted = {key: value for key, value in facts.items() if key != "metrics"}
    position = parse_name(name) or (snapshot.position, 0)
    staged = Stager(World(), lambda path: False).stage(_state_dict(store, snapshot), Buffer())
    weights = StagedWeights(staged, metrics, noted, position[0])
    file, manifest = weights.encoded(name, snapshot.manifest["run_id"])
    _check_bits(store, folder, weights, file, saved)

    def act() -> None:
        for path in (f"{folder}/{file}", f"{folder}/{name}.json"):
            store.remove(path)  # a folder may stand there
        store.write(f"{folder}/{file}", staged.data)
        store.write(f"{folder}/{name}.json", manifest)
        store.remove(f"{folder}/{name}{ASIDE}")

    return act


def _check_position(folder: str, name: str, snapshot: Snapshot) -> None:
    """Refuse weights of another step than that of `snapshot`, and last ones of a run that has not ended."""
    parsed = parse_name(name)
    if parsed is None:
        raise NotRebuilt("an older version of midstride wrote them")
    if folder == "last" and not is_of_the_end(snapshot):
        raise NotRebuilt(f"the newest good snapshot, {snapshot.name}, is not of the end of the run")
    same = parsed[0] == snapshot.position if folder == "last" else parsed[0].step == snapshot.position.step
    if not same:
        raise NotRebuilt(
            f"they are of step {parsed[0].step}, and the newest good snapshot, {snapshot.name}, is of another state"
        )


def _saved(store: Store, folder: str, name: str) -> SavedWeights | None:
    try:
        return open_weights(store, folder, name, Lineage.of(store))
    except (FileNotFoundError, SnapshotDamaged):
        return None


def _state_dict(store: Store, snapshot: Snapshot) -> dict[str, Any]:
    """Return the whole weights that the ranks gave to `snapshot`, without what metrics have seen."""
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
    """Return the layers of all stages of a pipeline; rank 0 has the last stage, the ranks of others follow."""
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


def _check_bits(store: Store, folder: str, weights: StagedWeights, file: str, saved: SavedWeights | None) -> None:
    """Refuse what differs from what is left of the weights, and best ones of which nothing is left to compare with."""
    if saved is not None:
        same = digest_of([weights.staged.data]) == saved.expected
    else:
        left = [other for other in store.list(folder) if other.startswith(file[: file.rindex("-") + 1])]
        same = file in left or not left
        if folder == "best" and not left:
            raise NotRebuilt("nothing is left of them that a snapshot of the same step could be compared with")
    if not same:
        raise NotRebuilt("the newest good snapshot holds other weights at their step")
