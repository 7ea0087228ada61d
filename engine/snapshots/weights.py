"""Weights alone: the best and the last of a run, with the metrics they reached."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing
from midstride.engine.snapshots.arena import Buffer
from midstride.engine.snapshots.checksums import check_facts, facts_of, seal, unseal
from midstride.engine.snapshots.codec import decode
from midstride.engine.snapshots.staging import Staged, Stager
from midstride.engine.snapshots.store import Store
from midstride.engine.world import World

__all__ = ["StagedWeights", "Weights", "load_weights", "save_weights", "weights_at", "write_weights"]

_FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Weights:
    """A module's state_dict, the metrics it reached, and the facts noted beside."""

    state_dict: dict[str, Any]
    metrics: dict[str, float]
    facts: dict[str, Any]


@dataclass(frozen=True)
class StagedWeights:
    """Weights in memory, as they will be written; `facts` are JSON values, "step" among them is part of a name."""

    staged: Staged
    metrics: dict[str, float]
    facts: dict[str, Any]


def save_weights(
    store: Store, folder: str, state_dict: dict[str, Any], metrics: dict[str, float], facts: dict[str, Any]
) -> None:
    """Replace the weights in `folder`, here and now.

    Args:
        store: of the run.
        folder: "best" or "last".
        state_dict: of the module; tensors may be tied or lie in memory in any order.
        metrics: by name.
        facts: JSON values; "step", if there, becomes part of the file's name.
    """
    staged = Stager(World(), lambda path: False).stage(state_dict, Buffer())
    write_weights(store, folder, StagedWeights(staged, metrics, facts))


def write_weights(
    store: Store, folder: str, weights: StagedWeights, *, check: Callable[[], None] = lambda: None
) -> None:
    """Replace the weights in `folder`; at every moment it holds the old ones or the new ones, whole.

    `check` raises where nothing may be replaced any more. It is asked right before each step that others see: a world
    may have slept at any place while another took over.
    """
    data, facts = weights.staged.data, weights.facts
    fact = facts_of([data])
    # The checksum in the name keeps weights of the same step apart: nothing a manifest refers to is overwritten.
    name = f"weights-{facts.get('step', 0):012d}-{fact['xxh3_128'][:8]}.safetensors"
    store.write(f"{folder}/{name}", data)
    document = {"metrics": weights.metrics, "facts": facts, "state_dict": weights.staged.document}
    manifest = {"format": _FORMAT, "files": {name: fact}, **document, "time": time.time()}
    store.write(f"{folder}/{_MANIFEST}", seal(manifest), check=check)
    for other in store.list(folder):
        if other not in (name, _MANIFEST):
            check()
            store.remove(f"{folder}/{other}")


def load_weights(store: Store, folder: str) -> Weights:
    """Return the weights in `folder`.

    Raises:
        SnapshotMissing: none were saved.
        SnapshotDamaged: the file is missing or differs from its manifest.
    """
    where = f"{store.url}/{folder}"
    try:
        manifest = unseal(store.read(f"{folder}/{_MANIFEST}"), f"{where}/{_MANIFEST}")
    except FileNotFoundError as error:
        raise SnapshotMissing(f"no weights were saved in {where}") from error
    ((name, expected),) = manifest["files"].items()
    try:
        data = store.read(f"{folder}/{name}")
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{where}/{name} is missing, its manifest says {expected['bytes']} bytes") from error
    check_facts(f"{where}/{name}", expected, facts_of([data]))
    return Weights(decode(manifest["state_dict"], load(data)), manifest["metrics"], manifest["facts"])


def weights_at(path: str) -> Weights:
    """Return the weights in a run's `best` or `last` folder, given its path or URL; raises as `load_weights`."""
    url, _, folder = path.rstrip("/").rpartition("/")
    return load_weights(Store.open(url or "."), folder)
