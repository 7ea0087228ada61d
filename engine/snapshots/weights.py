"""Best and last weights of a run: which of them count, and their facts. Needs no torch.

    best/000000001200-g000003/   position and generation, as in a snapshot's name
        model.safetensors        the tensors by name: any tool can open them
        model.json               ties and memory layouts
        manifest.json            written last: metrics, facts and checksums

Weights are snapshots of the module alone: one committer writes them, one catalog finds them, the lineage decides which
of them count. `reader.py` reads them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.snapshots.catalog import SNAPSHOTS, WEIGHTS, Catalog, Snapshot
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.position import parse_name
from midstride.engine.storage.checksums import check_digest, digest_of
from midstride.engine.storage.store import Store

__all__ = [
    "best_of",
    "best_to_show",
    "download_tensors",
    "error_with_remedy",
    "facts_of",
    "folder_to_test",
    "is_of_the_end",
    "last_is_missing",
    "missing_weights",
    "newest_weights",
]

log = logging.getLogger(__name__)


@contextmanager
def error_with_remedy() -> Iterator[None]:
    """Add the remedy to errors about damaged weights in the block."""
    try:
        yield
    except SnapshotDamaged as error:
        if "snapshots repair" in str(error):
            raise
        raise SnapshotDamaged(
            f"{error}. `midstride snapshots repair` sets them aside, as resuming the run does: older ones count then"
        ) from error


@error_with_remedy()
def newest_weights(store: Store, folder: str) -> Snapshot | None:
    """Return the weights in `folder` ("best" or "last") that count; None if none were saved.

    Raises:
        SnapshotDamaged: their manifest, or a lease of the run, is not what was written.
    """
    return Catalog(store, folder).newest()


def download_tensors(store: Store, weights: Snapshot, path: Path) -> Path:
    """Write the tensors of `weights` into the local file `path`; return `path`.

    Raises:
        SnapshotDamaged: they are missing or differ from the manifest.
    """
    (name,) = [name for name in weights.manifest["files"] if name.endswith(".safetensors")]

    def copied() -> Iterator[bytes | memoryview]:
        with path.open("wb") as file:
            for chunk in store.stream(f"{weights.path}/{name}"):
                file.write(chunk)
                yield chunk

    try:
        found = digest_of(copied())
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{store.url}/{weights.path}/{name} is missing") from error
    check_digest(f"{store.url}/{weights.path}/{name}", weights.manifest["files"][name], found)
    return path


def folder_to_test(store: Store) -> str:
    """Return "best", or "last" without best weights of the last fit's monitor.

    Raises:
        SnapshotDamaged: a manifest, or a lease of the run, is not what was written.
    """
    best, others = _best_and_other_monitors(store)
    if best is not None and not others:
        return "best"
    if best is not None:
        log.warning("%s/%s was %s: its last weights are taken", store.url, best.path, others)
    return "last"


def best_to_show(store: Store) -> Snapshot | None:
    """Return the best weights, if any and of the last fit's monitor.

    Raises:
        SnapshotDamaged: a manifest, or a lease of the run, is not what was written.
    """
    best, others = _best_and_other_monitors(store)
    return None if others else best


def _best_and_other_monitors(store: Store) -> tuple[Snapshot | None, str]:
    """Return the best weights, and a text if other monitors than the last fit's chose them."""
    best, last = (newest_weights(store, folder) for folder in WEIGHTS)
    then, now = (saved.manifest["facts"].get("monitors") if saved else None for saved in (best, last))
    if then is None or now is None or all(one in now for one in then):
        return best, ""
    return best, f"called best by {_monitors(then)}, and the run ended with {_monitors(now)}"


def _monitors(watched: Sequence[Mapping[str, str]]) -> str:
    return " and ".join(f"{one['monitor']} ({one['mode']})" for one in watched) or "no monitor"


def best_of(store: Store, monitor: str, mode: str) -> dict[str, Any]:
    """Return the facts of the best weights; {} if another value or mode made them the best."""
    facts = facts_of(store, "best")
    watched = facts.get("monitors")  # empty if a callback of the user's called them best
    return {} if watched and {"monitor": monitor, "mode": mode} not in watched else facts


def facts_of(store: Store, folder: str) -> dict[str, Any]:
    """Return the facts of the weights in `folder`, with metrics; {} if none can be read."""
    try:
        saved = newest_weights(store, folder)
    except SnapshotDamaged:
        return {}
    return saved.manifest["facts"] if saved else {}


def missing_weights(store: Store, snapshot: Snapshot) -> dict[str, str]:
    """Return messages by folder on missing weights that the manifest of `snapshot` names."""
    lineage = Lineage.of(store)
    return {
        folder: f"weights {store.url}/{folder}/{name} are missing"
        for folder, name in snapshot.manifest["facts"].get("weights", {}).items()
        if lineage.holds(name) and not Catalog(store, folder).has(name)
    }


def last_is_missing(store: Store, newest: Snapshot) -> str:
    """Return a message if `newest` ends the run and `last` has no weights of the end."""
    if not is_of_the_end(newest):
        return ""
    parsed = parse_name(Catalog(store, "last").newest_name())
    if parsed is not None and parsed[0] >= newest.position:
        return ""
    return f"the run came to its end with snapshot {newest.name}, and {store.url}/last has no weights of it"


def is_of_the_end(snapshot: Snapshot) -> bool:
    """Return whether `snapshot` was taken when the fit had come to its own end."""
    return snapshot.folder == SNAPSHOTS and bool(snapshot.manifest["facts"].get("progress", {}).get("finished"))
