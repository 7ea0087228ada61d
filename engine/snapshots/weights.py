"""Weights alone: the best and the last of a run, with the metrics they reached."""

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing
from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.lease import Lease, ensure_newest
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.position import Position, parse_name, snapshot_name
from midstride.engine.snapshots.staging import Staged, Stager
from midstride.engine.snapshots.weights_index import (
    COPY,
    error_with_remedy,
    files_of,
    newest_weights,
    required_files,
    weights_names,
)
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.state.codec import decode
from midstride.engine.state.tensor_file import read_tensors
from midstride.engine.storage.checksums import digest_of, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.world import World

__all__ = ["StagedWeights", "Weights", "WeightsFolder", "WeightsRequest", "load_weights", "save_weights", "weights_at"]

_FORMAT = 1
_OF_NAME = re.compile(r"(?:weights-)?([\d.]+-g\d+)[-.].*")


@dataclass(frozen=True)
class Weights:
    """A module's state_dict, the metrics it reached, and the facts noted beside."""

    state_dict: dict[str, Any]
    metrics: dict[str, float]
    facts: dict[str, Any]


@dataclass(frozen=True)
class WeightsRequest:
    """Weights to save.

    Args:
        folder: "best" or "last".
        position: where the run stands.
        state_dict: of the module; tensors may be tied or lie in memory in any order.
        metrics: logged values that the weights reached, by name.
        facts: JSON values for the manifest.
    """

    folder: str
    position: Position
    state_dict: dict[str, Any]
    metrics: dict[str, float]
    facts: dict[str, Any]


@dataclass(frozen=True)
class StagedWeights:
    """Weights in memory, as they will be written, and where the run stood; `facts` are JSON values."""

    staged: Staged
    metrics: dict[str, float]
    facts: dict[str, Any]
    position: Position

    def encoded(self, name: str, run_id: str) -> tuple[str, bytes]:
        """Return how the file of tensors of the weights called `name` is called, and their manifest."""
        digest = digest_of([self.staged.data])
        # The checksum in the name keeps weights of the same position apart.
        file = f"weights-{name}-{digest['xxh3_128'][:8]}.safetensors"
        manifest = {
            "format": _FORMAT,
            "name": name,
            "run_id": run_id,
            "files": {file: digest},
            "metrics": self.metrics,
            "facts": self.facts,
            "state_dict": self.staged.document,
            "time": time.time(),
        }
        return file, encode_document(manifest)


class WeightsFolder:
    """The folder "best" or "last", in the hands of one generation.

    Nothing that a manifest refers to is overwritten, and nothing of another generation: a reader finds the old weights
    or the new ones, whole.

    Args:
        store: of the run.
        lease: of this generation.
        folder: "best" or "last".
    """

    def __init__(self, store: Store, lease: Lease, folder: str) -> None:
        self._store, self._lease, self._folder = store, lease, folder
        self._files: dict[str, list[str]] | None = None  # of the weights that count, oldest first; None: not listed yet

    def write(self, weights: StagedWeights) -> str:
        """Write `weights`; return their name.

        Raises:
            Superseded: a newer generation advances the run. What was written by then is never read.
        """
        name = snapshot_name(weights.position, self._lease.generation)
        file, manifest = weights.encoded(name, self._lease.run_id)
        self._store.write(f"{self._folder}/{file}", weights.staged.data)
        path = f"{self._folder}/{name}.json"
        self._store.write(path, manifest, check=lambda: ensure_newest(self._store, self._lease))
        if self._files is not None:
            for other in self._files.pop(name, []):
                if other not in (file, f"{name}.json"):
                    self._store.remove(f"{self._folder}/{other}")
            self._files[name] = [f"{name}.json", file]
        return name

    def drop(self, name: str) -> None:
        """Remove the weights called `name`, which this generation has written."""
        if self._files is not None:
            self._remove(self._files.pop(name, []))

    def sweep(self, positions: Iterable[Position]) -> None:
        """Remove what no run that resumes from one of `positions` has use for, and what older generations left."""
        if self._files is None:
            self._files = self._listed()
        wanted = required_files(list(self._files), positions)
        if unneeded := [name for name in self._files if name not in wanted]:
            ensure_newest(self._store, self._lease)
            for name in unneeded:
                self._remove(self._files.pop(name))

    def _listed(self) -> dict[str, list[str]]:
        """Return the weights that count and their files, removing those of older generations that do not."""
        files = self._store.list(self._folder)
        names = weights_names(self._store, self._folder, Lineage.of(self._store))
        ensure_newest(self._store, self._lease)
        found = {name: files_of(files, name) for name in names}
        if COPY in found:
            found[COPY] += [file for file in files if file.startswith("weights-") and not _OF_NAME.fullmatch(file)]
        mine = {file for known in found.values() for file in known}
        self._remove([file for file in files if file not in mine and self._is_over(file, files)])
        return found

    def _is_over(self, file: str, files: list[str]) -> bool:
        """Whether `file` is of weights that are not read any more, or that were never whole; those set aside stay."""
        match = _OF_NAME.fullmatch(file)
        parsed = parse_name(match[1]) if match else None
        if parsed is None or match is None or f"{match[1]}.aside.json" in files:
            return False
        return parsed[1] <= self._lease.generation

    def _remove(self, files: Iterable[str]) -> None:
        for file in files:  # the manifest first
            self._store.remove(f"{self._folder}/{file}")


def save_weights(
    store: Store, folder: str, state_dict: dict[str, Any], metrics: dict[str, float], facts: dict[str, Any]
) -> None:
    """Replace the weights in `folder`, here and now, in a run that no world advances.

    Args:
        store: of the run.
        folder: "best" or "last".
        state_dict: of the module; tensors may be tied or lie in memory in any order.
        metrics: by name.
        facts: JSON values; "step", if there, becomes part of the file's name.
    """
    lineage = Lineage.of(store)
    generation = max(lineage.ends, default=1)
    target = WeightsFolder(store, Lease(generation, None, lineage.run_id), folder)
    staged = Stager(World(), lambda path: False).stage(state_dict, Buffer())
    target.sweep([])
    target.write(StagedWeights(staged, metrics, facts, Position(facts.get("step", 0))))
    target.sweep([])


@error_with_remedy()
def load_weights(store: Store, folder: str) -> Weights:
    """Return the weights in `folder` that count.

    Raises:
        SnapshotMissing: none were saved.
        SnapshotDamaged: the file is missing or differs from its manifest.
    """
    while (saved := newest_weights(store, folder)) is not None:
        manifest = saved.manifest
        try:
            with damaged_on_error(f"{store.url}/{saved.path}"):
                tensors = read_tensors(store, f"{folder}/{saved.file}", saved.expected)
                return Weights(decode(manifest["state_dict"], tensors), manifest["metrics"], manifest["facts"])
        except SnapshotDamaged:
            if store.exists(saved.path):
                raise  # else newer ones took their place meanwhile
    raise SnapshotMissing(f"no weights were saved in {store.url}/{folder}")


def weights_at(path: str | os.PathLike[str]) -> Weights:
    """Return the weights at `path`: a run's `best` or `last` folder, its URL, or a file that `save_checkpoint` wrote.

    Raises:
        SnapshotMissing: none were saved there.
        SnapshotDamaged: a file is missing or differs from its manifest, or is no checkpoint.
    """
    path = os.fspath(path)
    if Path(path).is_file():
        return _of_checkpoint(path)
    url, _, folder = path.rstrip("/").rpartition("/")
    return load_weights(Store.open(url or "."), folder)


def _of_checkpoint(path: str) -> Weights:
    """Return what Lightning's format keeps in the file at `path`; objects are never made of a file's bytes."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SnapshotDamaged(
            f"{path} is damaged, or no file of tensors and plain values alone. If you trust who wrote it, load the "
            f'weights yourself: module.load_state_dict(torch.load("{path}", weights_only=False)["state_dict"])'
        ) from error
    if not isinstance(found, Mapping) or "state_dict" not in found:
        raise SnapshotDamaged(f"{path} has no state_dict in it: a file that trainer.save_checkpoint wrote has one")
    return Weights(found["state_dict"], {}, {"hparams": dict(found.get("hyper_parameters", {}))})
