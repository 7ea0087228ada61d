"""Which weights of a run count. Needs no torch.

    best/000000001200-g000003.json                          a manifest: place and generation, as a snapshot's name
    best/weights-000000001200-g000003-1a2b3c4d.safetensors  the tensors it names

Weights obey the lineage as snapshots do: what a superseded world writes has names of its own, and is never read. A
folder with a `manifest.json` holds one set of weights: a copy, or what an older version of midstride wrote.
"""

import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing
from midstride.engine.snapshots.checksums import FileFacts, check_facts, facts_of, unseal
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.place import Place, parse_name
from midstride.engine.snapshots.store import Store

__all__ = [
    "COPY",
    "FOLDERS",
    "SavedWeights",
    "metrics_of",
    "needed",
    "newest_weights",
    "set_weights_aside",
    "verify_weights",
    "weights_names",
]

FOLDERS = ("best", "last")
#: what the manifest is called where a folder holds one set of weights only
COPY = "manifest"
_ASIDE = ".aside.json"


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
    def expected(self) -> FileFacts:
        """Size and checksum of the tensors."""
        facts: FileFacts = self.manifest["files"][self.file]
        return facts


def newest_weights(store: Store, folder: str) -> SavedWeights | None:
    """Return the weights in `folder` ("best" or "last") that count; None if none were saved.

    Raises:
        SnapshotDamaged: their manifest, or a lease of the run, is not what was written.
    """
    lineage = Lineage.of(store)
    while names := weights_names(store, folder, lineage):
        try:
            return _open(store, folder, names[-1], lineage)
        except FileNotFoundError:
            continue  # newer ones took their place meanwhile
    return None


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


def needed(names: Sequence[str], places: Iterable[Place]) -> set[str]:
    """Return which of the weights called `names`, oldest first, a run has use for that may resume from `places`.

    Weights of the very place of a snapshot may have been saved before it or after it. What is newer than all of them
    may be wanted by a snapshot on its way.
    """
    places = sorted(places)
    wanted = {*names[-1:], *(name for name in names if places and _age(name)[1] > places[-1])}
    for place in places:
        wanted |= {name for name in names if _age(name)[1] == place}
        wanted |= set([name for name in names if _age(name)[1] < place][-1:])
    return wanted


def verify_weights(store: Store, saved: SavedWeights) -> None:
    """Read the tensors of `saved` and compare them with their manifest.

    Raises:
        SnapshotDamaged: they are missing or differ.
        SnapshotMissing: newer ones took their place meanwhile.
    """
    path = f"{saved.folder}/{saved.file}"
    where = f"{store.url}/{path}"
    try:
        found = facts_of(store.stream(path))
    except FileNotFoundError as error:
        if not store.exists(saved.path):
            raise SnapshotMissing(f"{where} was removed while it was read") from error
        raise SnapshotDamaged(f"{where} is missing, its manifest says {saved.expected['bytes']} bytes") from error
    check_facts(where, saved.expected, found)


def set_weights_aside(store: Store, folder: str, name: str, reason: str) -> None:
    """Mark weights as not to be read again."""
    store.write(f"{folder}/{name}{_ASIDE}", json.dumps({"reason": reason, "time": time.time()}, indent=1).encode())


def files_of(files: Collection[str], name: str) -> list[str]:
    """Return which of `files` are of the weights called `name`, the manifest first."""
    return sorted(file for file in files if file == f"{name}.json" or file.startswith((f"weights-{name}-", f"{name}.")))


def _open(store: Store, folder: str, name: str, lineage: Lineage) -> SavedWeights:
    where = f"{store.url}/{folder}/{name}.json"
    saved = SavedWeights(folder, name, unseal(store.read(f"{folder}/{name}.json"), where))
    if name != COPY:
        found = saved.manifest.get("name")
        if found != name:
            raise SnapshotDamaged(f"{where} is the manifest of weights {found}, not of {name}")
        run_id = saved.manifest.get("run_id")
        if lineage.run_id and run_id != lineage.run_id:
            raise SnapshotDamaged(f"{where} is of another run ({run_id}), this run is {lineage.run_id}")
    return saved


def _age(name: str) -> tuple[int, Place]:
    """What weights are sorted by: of a newer generation nothing is older than what it resumed from."""
    parsed = parse_name(name)
    return (parsed[1], parsed[0]) if parsed else (0, Place(-1))
