"""Which weights of a run count. Needs no torch.

    best/000000001200-g000003.json                          a manifest: position and generation, as a snapshot's name
    best/weights-000000001200-g000003-1a2b3c4d.safetensors  the tensors it names

Weights obey the lineage as snapshots do: what a superseded world writes has names of its own, and is never read. A
folder with a `manifest.json` holds one set of weights: a copy, or what an older version of midstride wrote.
"""

import json
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing
from midstride.engine.snapshots.catalog import Snapshot
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.position import Position, parse_name
from midstride.engine.snapshots.verification import verify_files
from midstride.engine.state.bounds import check_files, damaged_on_error
from midstride.engine.storage.checksums import FileDigest
from midstride.engine.storage.documents import read_document
from midstride.engine.storage.store import Store

log = logging.getLogger(__name__)

__all__ = [
    "ASIDE",
    "COPY",
    "FOLDERS",
    "SavedWeights",
    "best_of",
    "best_to_show",
    "error_with_remedy",
    "folder_to_test",
    "is_of_the_end",
    "last_is_missing",
    "metrics_of",
    "missing_weights",
    "newest_weights",
    "open_weights",
    "required_files",
    "set_damaged_weights_aside",
    "verify_weights",
    "weights_names",
]

FOLDERS = ("best", "last")
#: what the manifest is called where a folder holds one set of weights only
COPY = "manifest"
#: how the marker of weights that are not to be read again ends
ASIDE = ".aside.json"
_KEYS = ("files", "metrics", "facts", "state_dict")


@dataclass(frozen=True)
class SavedWeights:
    """Weights that were saved: the stem of their manifest's name, and what it says."""

    folder: str
    name: str
    manifest: dict[str, Any]

    @property
    def path(self) -> str:
        """The manifest, below the run."""
        return f"{self.folder}/{self.name}.json"

    @property
    def file(self) -> str:
        """The tensors, below `folder`."""
        (name,) = self.manifest["files"]
        return str(name)

    @property
    def expected(self) -> FileDigest:
        """Size and checksum of the tensors."""
        expected: FileDigest = self.manifest["files"][self.file]
        return expected

    def download(self, store: Store, path: Path) -> Path:
        """Write the tensors into the local file `path`; return `path`."""
        with path.open("wb") as file:
            file.writelines(store.stream(f"{self.folder}/{self.file}"))
        return path


@contextmanager
def error_with_remedy() -> Iterator[None]:
    """Say what to do about damaged weights in the error that the block raises of them."""
    try:
        yield
    except SnapshotDamaged as error:
        if "snapshots repair" in str(error):
            raise
        raise SnapshotDamaged(
            f"{error}. `midstride snapshots repair` sets them aside, as resuming the run does: older ones count then"
        ) from error


@error_with_remedy()
def newest_weights(store: Store, folder: str) -> SavedWeights | None:
    """Return the weights in `folder` ("best" or "last") that count; None if none were saved.

    Raises:
        SnapshotDamaged: their manifest, or a lease of the run, is not what was written.
    """
    lineage = Lineage.of(store)
    while names := weights_names(store, folder, lineage):
        try:
            return open_weights(store, folder, names[-1], lineage)
        except FileNotFoundError:
            continue  # newer ones took their place meanwhile
    return None


def folder_to_test(store: Store) -> str:
    """Return "best", or "last" if none were called best, or if those were by a monitor that the last fit has not.

    Raises:
        SnapshotDamaged: a manifest, or a lease of the run, is not what was written.
    """
    best, others = _best_and_other_monitors(store)
    if best is not None and not others:
        return "best"
    if best is not None:
        log.warning("%s/%s was %s: its last weights are taken", store.url, best.path, others)
    return "last"


def best_to_show(store: Store) -> SavedWeights | None:
    """Return the best weights; None if there are none, or if those were by a monitor that the last fit has not.

    Raises:
        SnapshotDamaged: a manifest, or a lease of the run, is not what was written.
    """
    best, others = _best_and_other_monitors(store)
    return None if others else best


def _best_and_other_monitors(store: Store) -> tuple[SavedWeights | None, str]:
    """Return the best weights, and a text if other monitors called them so than those of the last fit."""
    best, last = (newest_weights(store, folder) for folder in FOLDERS)
    then, now = (saved.manifest["facts"].get("monitors") if saved else None for saved in (best, last))
    if then is None or now is None or all(one in now for one in then):  # None: not there, or of an earlier version
        return best, ""
    return best, f"called best by {_monitors(then)}, and the run ended with {_monitors(now)}"


def _monitors(watched: Sequence[Mapping[str, str]]) -> str:
    return " and ".join(f"{one['monitor']} ({one['mode']})" for one in watched) or "no monitor"


def best_of(store: Store, monitor: str, mode: str) -> dict[str, Any]:
    """Return what the manifest of the best weights says; nothing if another value or mode made them the best."""
    manifest = metrics_of(store, "best")
    watched = manifest.get("facts", {}).get("monitors")
    # None or empty: an earlier version wrote it, or a callback of the user's called them best
    return {} if watched and {"monitor": monitor, "mode": mode} not in watched else manifest


def metrics_of(store: Store, folder: str) -> dict[str, Any]:
    """Return what the manifest of the weights in `folder` says; nothing where there are none that can be read."""
    try:
        saved = newest_weights(store, folder)
    except SnapshotDamaged:
        return {}
    return saved.manifest if saved else {}


def weights_names(store: Store, folder: str, lineage: Lineage) -> list[str]:
    """Return the names of the weights in `folder` that count, oldest first."""
    stems = {file.removesuffix(".json") for file in store.list(folder) if file.endswith(".json")}
    aside = {stem.removesuffix(".aside") for stem in stems if stem.endswith(".aside")}
    counted = [stem for stem in stems - aside if stem == COPY or (parse_name(stem) and lineage.holds(stem))]
    return sorted(counted, key=_age)


def required_files(names: Sequence[str], positions: Iterable[Position]) -> set[str]:
    """Return which of the weights called `names`, oldest first, a run has use for that may resume from `positions`.

    Weights of the very position of a snapshot may have been saved before it or after it. What is newer than all of them
    may be wanted by a snapshot on its way.
    """
    positions = sorted(positions)
    wanted = {*names[-1:], *(name for name in names if positions and _age(name)[1] > positions[-1])}
    for position in positions:
        wanted |= {name for name in names if _age(name)[1] == position}
        wanted |= set([name for name in names if _age(name)[1] < position][-1:])
    return wanted


def verify_weights(store: Store, saved: SavedWeights) -> None:
    """Read the tensors of `saved` and compare them with their manifest.

    Raises:
        SnapshotDamaged: they are missing or differ.
        SnapshotMissing: newer ones took their place meanwhile.
    """
    verify_files(store, saved.path, saved.manifest["files"])


def set_damaged_weights_aside(store: Store, folder: str) -> None:
    """Mark the newest weights in `folder` as not to be read again, with a warning, until whole ones are the newest."""
    lineage = Lineage.of(store)
    for name in reversed(weights_names(store, folder, lineage)):
        try:
            verify_weights(store, open_weights(store, folder, name, lineage))
            return
        except (FileNotFoundError, SnapshotMissing):
            continue  # newer ones took their place meanwhile
        except SnapshotDamaged as error:
            log.warning("weights %s/%s are set aside, older ones count: %s", folder, name, error)
            marker = json.dumps({"reason": str(error), "time": time.time()}, indent=1)
            store.write(f"{folder}/{name}{ASIDE}", marker.encode())


def missing_weights(store: Store, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return messages by folder: weights that a snapshot's `manifest` speaks of and that are not there."""
    lineage = Lineage.of(store)
    told = manifest["facts"].get("weights", {})
    return {
        folder: f"weights {store.url}/{folder}/{name}.json are missing"
        for folder, name in told.items()
        if f"{name}.json" not in store.list(folder) and lineage.holds(name)
    }


def last_is_missing(store: Store, newest: Snapshot) -> str:
    """Say that the snapshot `newest` is of the end of the run, and that no last weights of it count; else nothing."""
    if not is_of_the_end(newest):
        return ""
    names = weights_names(store, "last", Lineage.of(store))
    if any(name == COPY or _age(name)[1] >= newest.position for name in names):
        return ""
    return f"the run came to its end with snapshot {newest.name}, and {store.url}/last has no weights of it"


def is_of_the_end(snapshot: Snapshot) -> bool:
    """Return whether `snapshot` was taken when the fit had come to its own end."""
    return bool(snapshot.manifest["facts"].get("progress", {}).get("finished"))


def files_of(files: Collection[str], name: str) -> list[str]:
    """Return which of `files` are of the weights called `name`, the manifest first."""
    return sorted(file for file in files if file == f"{name}.json" or file.startswith((f"weights-{name}-", f"{name}.")))


def open_weights(store: Store, folder: str, name: str, lineage: Lineage) -> SavedWeights:
    """Return the weights in `folder` called `name`, by their manifest.

    Raises:
        SnapshotDamaged: it is not what was written, or is of other weights.
        FileNotFoundError: there is none.
    """
    where = f"{store.url}/{folder}/{name}.json"
    saved = SavedWeights(folder, name, read_document(store, f"{folder}/{name}.json", *_KEYS))
    with damaged_on_error(where):
        check_files(saved.manifest, where)
        if len(saved.manifest["files"]) != 1:
            raise SnapshotDamaged(f"{where} names {len(saved.manifest['files'])} files, and weights are in one")
    if name != COPY:
        found = saved.manifest.get("name")
        if found != name:
            raise SnapshotDamaged(f"{where} is the manifest of weights {found}, not of {name}")
        run_id = saved.manifest.get("run_id")
        if lineage.run_id and run_id != lineage.run_id:
            raise SnapshotDamaged(f"{where} is of another run ({run_id}), this run is {lineage.run_id}")
    return saved


def _age(name: str) -> tuple[int, Position]:
    """What weights are sorted by: of a newer generation nothing is older than what it resumed from."""
    parsed = parse_name(name)
    return (parsed[1], parsed[0]) if parsed else (0, Position(-1))
