"""The writer: every rank writes its part, then rank 0 commits the whole.

Nobody can see a snapshot before its manifest, and the manifest is written only after every rank has said that its
files are durable. An error of one rank reaches all of them, as the same error.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from safetensors.torch import save

from midstride.engine.errors import EngineError, SnapshotError, Superseded
from midstride.engine.snapshots.checksums import FileFacts, facts_of, seal, unseal
from midstride.engine.snapshots.codec import Encoded, encode
from midstride.engine.snapshots.history import FORMAT, MANIFEST, ROWS, SNAPSHOTS, History, Snapshot
from midstride.engine.snapshots.lease import Lease, superseded_by
from midstride.engine.snapshots.place import Place, part_name, snapshot_name
from midstride.engine.snapshots.store import Store
from midstride.engine.world import World

__all__ = ["Writer", "deal"]

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """What a rank tells the others about its files."""

    files: dict[str, FileFacts]
    shared: FileFacts  # facts of the list of replicated tensors: every rank must hold the same
    progress: Any


class Writer:
    """Takes the snapshots of one generation.

    Args:
        store: of the run.
        lease: of this generation.
        world: this process among the others.
        gather: returns the values that all ranks gave to it, by rank; a collective.
        run: name of the run, for the manifest.
        keep: how many snapshots stay.
    """

    def __init__(
        self, store: Store, lease: Lease, world: World, gather: Callable[[object], list[Any]], run: str, keep: int
    ) -> None:
        self._store = store
        self._lease = lease
        self._world = world
        self._gather = gather
        self._run = run
        self._keep = keep
        self._newest: Snapshot | None = None

    def take(
        self,
        place: Place,
        state: object,
        replicated: Callable[[str], bool],
        rows: str,
        facts: dict[str, Any],
        probe: Callable[[str], object] = lambda phase: None,
    ) -> Snapshot:
        """Write a snapshot of all ranks and return it once it is committed; every rank calls this at the same place.

        Taken again at the place of the one before, it returns that one.

        Args:
            place: where the run stands.
            state: this rank's tree.
            replicated: whether the tensor of a name is the same on every rank, and so is written once.
            rows: of the metric log since the snapshot before; rank 0's count.
            facts: JSON values for the manifest; rank 0's count.
            probe: called with "snapshot_write" and "before_commit", for injected faults.

        Raises:
            UnsupportedState: the state of some rank cannot be written.
            Superseded: a newer generation advances the run.
            SnapshotError: some rank could not write.
        """
        name = snapshot_name(place, self._lease.generation)
        if self._newest is not None and self._newest.name == name:
            return self._newest
        parts = self._together(name, lambda: self._write(name, encode(state), replicated, rows, probe))
        manifest = self._together(name, lambda: self._commit(name, place, parts, facts, probe))[0]
        self._newest = Snapshot(name, place, self._lease.generation, manifest)
        if self._world.is_first:
            self._prune()
        return self._newest

    def flush(self) -> None:
        """Wait until every snapshot taken is committed; at once, as long as `take` waits itself."""

    def close(self) -> None:
        """Flush, and let go of whatever writes in the background."""
        self.flush()

    def _together(self, name: str, act: Callable[[], T]) -> list[T]:
        """Return what `act` returns on every rank, or raise on every rank what the first one that failed raised."""
        mine: T | None = None
        failure: tuple[type[EngineError], str] | None = None
        cause: Exception | None = None
        try:
            mine = act()
        except Exception as error:
            cause = error
            kind = type(error) if isinstance(error, EngineError) else SnapshotError
            failure = kind, str(error) if kind is type(error) else f"{type(error).__name__}: {error}"
        answers = self._gather((mine, failure))
        for rank, (_, failed) in enumerate(answers):
            if failed is not None:
                raise failed[0](f"snapshot {name} was not taken, rank {rank} says: {failed[1]}") from cause
        return [answer for answer, _ in answers]

    def _write(
        self, name: str, encoded: Encoded, replicated: Callable[[str], bool], rows: str, probe: Callable[[str], object]
    ) -> _Part:
        """Write the files of this rank."""
        shared = {key: tensor.nbytes for key, tensor in sorted(encoded.tensors.items()) if replicated(key)}
        writers = deal(shared, self._world.size)
        mine, elsewhere = {}, dict[str, list[str]]()
        for key, tensor in encoded.tensors.items():
            rank = writers.get(key, self._world.rank)
            if rank == self._world.rank:
                mine[key] = tensor
            else:
                elsewhere.setdefault(part_name(rank, self._world.size), []).append(key)
        document = {"format": FORMAT, "elsewhere": elsewhere, "tree": encoded.document}

        stem = part_name(self._world.rank, self._world.size)
        files = {f"{stem}.safetensors": self._put(name, f"{stem}.safetensors", save(mine))}
        probe("snapshot_write")
        files[f"{stem}.json"] = self._put(name, f"{stem}.json", json.dumps(document, allow_nan=False).encode())
        if self._world.is_first:
            files[ROWS] = self._put(name, ROWS, rows.encode())
        progress = encoded.document.get("progress") if isinstance(encoded.document, dict) else None
        return _Part(files, facts_of([json.dumps(shared).encode()]), progress)

    def _put(self, name: str, file: str, data: bytes) -> FileFacts:
        self._store.write(f"{SNAPSHOTS}/{name}/{file}", data)
        return facts_of([data])

    def _commit(
        self, name: str, place: Place, parts: list[_Part], facts: dict[str, Any], probe: Callable[[str], object]
    ) -> dict[str, Any]:
        """Write the manifest, on rank 0 and only if all files are there and nobody took over."""
        probe("before_commit")
        if not self._world.is_first:
            return {}
        files = {file: fact for part in parts for file, fact in part.files.items()}
        self._check(name, parts, files)
        manifest = {
            "format": FORMAT,
            "run": self._run,
            "run_id": self._lease.run_id,
            **{"step": place.step, "after": place.after, "generation": self._lease.generation},
            "world_size": self._world.size,
            "files": files,
            "progress": parts[0].progress,
            "facts": facts,
            "time": time.time(),
        }
        if newer := superseded_by(self._store, self._lease):
            raise Superseded(
                f"generation {newer.generation} advances {self._store.url} now, this world is generation "
                f"{self._lease.generation}: it stops"
            )
        data = seal(manifest)
        self._store.write(f"{SNAPSHOTS}/{name}/{MANIFEST}", data)
        return unseal(data, name)

    def _check(self, name: str, parts: list[_Part], files: Mapping[str, FileFacts]) -> None:
        for rank, part in enumerate(parts):
            if part.shared != parts[0].shared:
                raise SnapshotError(
                    f"rank {rank} and rank 0 do not hold the same replicated tensors (their lists differ: "
                    f"{part.shared['xxh3_128']} and {parts[0].shared['xxh3_128']}), so they cannot be written once"
                )
        for file, fact in files.items():
            path = f"{SNAPSHOTS}/{name}/{file}"
            try:
                found = self._store.size(path)
            except FileNotFoundError:
                found = -1
            if found != fact["bytes"]:
                seen = f"{found} bytes" if found >= 0 else "no such file"
                raise SnapshotError(
                    f"{self._store.url}/{path} was written with {fact['bytes']} bytes, rank 0 sees {seen}: "
                    "all ranks must share one store"
                )

    def _prune(self) -> None:
        """Remove old snapshots; what cannot be removed now is tried again after the next one."""
        try:
            History(self._store).prune(self._keep)
        except (OSError, SnapshotError) as error:
            log.warning("old snapshots of %s could not be removed: %s", self._store.url, error)


def deal(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return which rank writes which replicated tensor: the largest first, each to whoever has least to write.

    >>> deal({"a": 3, "b": 2, "c": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    load = [0] * ranks
    dealt = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        load[rank] += sizes[name]
        dealt[name] = rank
    return dealt
