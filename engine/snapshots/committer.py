"""The committer: every rank writes its files, then rank 0 commits them with a manifest.

Snapshots and weights are committed in the same way. No reader sees them before their manifest, and rank 0 writes the
manifest only after every rank has reported durable files. An error of one rank is raised on all of them.
"""

import base64
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from midstride.engine.errors import EngineError, SnapshotError, StoreSilent, Superseded, WorldError
from midstride.engine.snapshots.catalog import FORMAT, MANIFEST, ROWS, SNAPSHOTS, Snapshot
from midstride.engine.snapshots.lease import Lease, ensure_newest, newest
from midstride.engine.snapshots.position import Position, file_stem, snapshot_name
from midstride.engine.snapshots.state_copy import StateCopy
from midstride.engine.state.shared_containers import json_of
from midstride.engine.storage.checksums import BlockDigests, FileDigest, decode_document, digest_of, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.world import World

__all__ = ["Committer", "SnapshotRequest", "file_contents", "manifest_of"]

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotRequest:
    """A snapshot, or weights, as one rank has taken them, not yet written.

    Args:
        position: where the run stands.
        state: the state that this rank writes, or the error that kept it from being copied.
        facts: JSON values for the manifest; rank 0's count.
        rows: of the metric log since the snapshot before; rank 0's count; None for weights.
        probe: called with "snapshot_write" and "before_commit", for injected faults.
        dropped: snapshots whose rows are among these, and which must never be read beside this one.
        folder: the folder of the run: "snapshots", "best" or "last".
        take: how many times weights were saved at this position, this one included.
    """

    position: Position
    state: StateCopy | Exception
    facts: dict[str, Any]
    rows: str | None = None
    probe: Callable[[str], object] = lambda phase: None
    dropped: Sequence[str] = ()
    folder: str = SNAPSHOTS
    take: int = 1


@dataclass(frozen=True)
class _RankFiles:
    """Facts that a rank tells the others about its files."""

    files: dict[str, FileDigest]
    shared: FileDigest  # digest of the list of replicated tensors: every rank must hold the same


class Committer:
    """Writes the snapshots, or the weights, of one generation.

    Args:
        store: of the run.
        lease: of this generation.
        world: this process among the others.
        gather: returns the values that all ranks gave to it, by rank; a collective.
        run: name of the run, for the manifest.
    """

    def __init__(
        self, store: Store, lease: Lease, world: World, gather: Callable[[object], list[Any]], run: str
    ) -> None:
        self._store = store
        self._lease = lease
        self._world = world
        self._gather = gather
        self._run = run
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="midstride-checksum")

    def commit(self, request: SnapshotRequest, before: Callable[[], object]) -> Snapshot:
        """Write and commit `request`, and return it.

        Every rank calls this in the same order.

        Args:
            request: the snapshot to write.
            before: done first on this rank; if it raises, nothing is committed on any.

        Raises:
            UnsupportedState: the state of some rank cannot be written.
            Superseded: a newer generation advances the run.
            StoreSilent: the store did not answer some rank for as long as it was waited for.
            StoreFull: there was no room for what some rank wrote.
            SnapshotError: some rank could not write.
        """
        name = self.name_of(request)
        folder = f"{request.folder}/{name}"
        failed = f"snapshot {name} was not taken" if request.folder == SNAPSHOTS else f"{folder} was not written"

        def write() -> _RankFiles:
            before()
            return self._write(folder, request)

        try:
            ranks = self._on_all_ranks(failed, write)
            manifest = self._on_all_ranks(failed, lambda: self._commit(folder, request, ranks))[0]
        except (StoreSilent, WorldError):
            raise  # the store would not answer now, or another rank may still be writing
        except EngineError:
            self._remove_uncommitted(folder)
            raise
        return Snapshot(name, request.position, self._lease.generation, manifest, request.folder)

    def name_of(self, request: SnapshotRequest) -> str:
        """Return the name that `request` has once it is committed."""
        return snapshot_name(request.position, self._lease.generation, request.take)

    def _remove_uncommitted(self, folder: str) -> None:
        """Remove the files of all ranks after a failed commit, as no later attempt might."""
        if not self._world.is_first:
            return
        try:
            last = newest(self._store)
            # A run that was begun in the place of this one has such names, too.
            is_ours = last is not None and last.run_id == self._lease.run_id
            if is_ours and not self._store.exists(f"{folder}/{MANIFEST}"):
                self._store.remove(folder)
        except Exception as error:
            log.debug("the uncommitted files in %s were not removed: %s", folder, error)

    def exchange(self, failed: str, value: T) -> list[T]:
        """Return the `value` of each rank, by rank.

        Raises:
            WorldError: a rank was lost; the message begins with `failed`.
        """
        return self._on_all_ranks(failed, lambda: value)

    def close(self) -> None:
        """End the thread that computes checksums."""
        self._hasher.shutdown()

    def _on_all_ranks(self, failed: str, act: Callable[[], T]) -> list[T]:
        """Return the results of `act` by rank; raise a rank's error on all, after the text `failed`."""
        mine: T | None = None
        failure: tuple[type[EngineError], str] | None = None
        cause: Exception | None = None
        try:
            mine = act()
        except Exception as raised:
            cause = self._cause(raised)
            error = self._store.advice(cause) or cause
            kind = self._kind(error)
            failure = kind, str(error) if kind is type(error) else f"{type(error).__name__}: {error}"
        try:
            answers = self._gather((mine, failure))
        except Exception as error:
            raise WorldError(f"{failed}, a rank was lost while it was written: {error}") from error
        for rank, (_, fault) in enumerate(answers):
            if fault is not None:
                kind, message = fault
                # Nothing is wrong with the store where another world has taken over.
                where = "" if kind is Superseded else f"{failed}, rank {rank} says: "
                raise kind(f"{where}{message}") from cause
        return [answer for answer, _ in answers]

    def _cause(self, error: Exception) -> Exception:
        """Return `error`, or that a newer generation took over: it may have swept our files away."""
        try:
            ensure_newest(self._store, self._lease)
        except Superseded as superseded:
            return superseded
        except Exception:
            return error  # the store does not answer
        return error

    def _kind(self, error: Exception) -> type[EngineError]:
        if isinstance(error, EngineError):
            return type(error)
        return StoreSilent if self._store.is_transient(error) else SnapshotError

    def _write(self, folder: str, request: SnapshotRequest) -> _RankFiles:
        """Write the files of this rank."""
        state = request.state
        if isinstance(state, Exception):
            raise state
        if self._world.is_first and self.name_of(request) in request.dropped:  # never to be read half old and half new
            self._store.remove(f"{folder}/{MANIFEST}")
        digests: dict[str, FileDigest] = {}
        with closing(self._files(request, state, digests)) as files:
            self._store.write_all(folder, files)
        return _RankFiles(digests, state.shared)

    def _files(
        self, request: SnapshotRequest, state: StateCopy, digests: dict[str, FileDigest]
    ) -> Generator[tuple[str, bytes | memoryview], None, None]:
        """Yield name and content of the files of this rank; their digests are among `digests` then.

        The tensors are hashed while they are written.
        """
        stem = file_stem(request.folder == SNAPSHOTS, self._world.rank, self._world.size)
        hashed = self._hasher.submit(_hashed, state.data)
        try:
            yield f"{stem}.safetensors", state.data
        finally:
            hashed.exception()  # the buffer is not reused while it is read
        request.probe("snapshot_write")
        blocks = hashed.result()
        digests[f"{stem}.safetensors"] = blocks.of_file
        others = {f"{stem}.json": _document(state, blocks)}
        if self._world.is_first and request.rows is not None:
            others[ROWS] = request.rows.encode()
        for file, data in others.items():
            digests[file] = digest_of([data])
            yield file, data

    def _commit(self, folder: str, request: SnapshotRequest, ranks: list[_RankFiles]) -> dict[str, Any]:
        """Write the manifest on rank 0, if all files are there and no newer generation has the run."""
        request.probe("before_commit")
        if not self._world.is_first:
            return {}
        files = {file: digest for rank in ranks for file, digest in rank.files.items()}
        if len(ranks) > 1:  # a rank alone was told by the store
            self._check(folder, ranks, files)
        manifest = manifest_of(self._run, self._lease, request.position, self._world.size, files, request.facts)
        ensure_newest(self._store, self._lease, is_read=True)
        for old in request.dropped:  # it may be there all the same, if only the answer to its manifest was lost
            if f"{SNAPSHOTS}/{old}" != folder:
                self._store.remove(f"{SNAPSHOTS}/{old}")
        data = encode_document(manifest)
        self._store.write(f"{folder}/{MANIFEST}", data)
        return decode_document(data, folder)

    def _check(self, folder: str, ranks: list[_RankFiles], files: Mapping[str, FileDigest]) -> None:
        for rank, written in enumerate(ranks):
            if written.shared != ranks[0].shared:
                raise SnapshotError(
                    f"rank {rank} and rank 0 do not hold the same replicated tensors (their lists differ: "
                    f"{written.shared['xxh3_128']} and {ranks[0].shared['xxh3_128']}), so they cannot be written once"
                )
        found = self._store.find(folder)
        for file, digest in files.items():
            if found.get(file) != digest["bytes"]:
                seen = f"{found[file]} bytes" if file in found else "no such file"
                raise SnapshotError(
                    f"{self._store.url}/{folder}/{file} was written with {digest['bytes']} bytes, rank 0 sees {seen}: "
                    "all ranks must share one store"
                )


def manifest_of(
    run: str, lease: Lease, position: Position, world_size: int, files: Mapping[str, FileDigest], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the manifest of a snapshot or weights of `run`, taken under `lease`."""
    return {
        "format": FORMAT,
        "run": run,
        "run_id": lease.run_id,
        "step": position.step,
        "after": position.after,
        "generation": lease.generation,
        "resumed_from": lease.resumed_from,
        "ancestors": lease.ancestors,
        "world_size": world_size,
        "files": files,
        "facts": facts,
        "time": time.time(),
    }


def file_contents(stem: str, state: StateCopy) -> list[tuple[str, bytes | memoryview]]:
    """Return name and content of the two files of one rank: tensors, and everything else."""
    return [(f"{stem}.safetensors", state.data), (f"{stem}.json", _document(state, _hashed(state.data)))]


def _document(state: StateCopy, blocks: BlockDigests) -> bytes:
    document = {
        "format": FORMAT,
        "elsewhere": state.stored_by_rank,
        "blocks": base64.b64encode(blocks.table).decode(),
        "tree": state.document,
    }
    return json_of(document)


def _hashed(data: memoryview) -> BlockDigests:
    blocks = BlockDigests()
    blocks.update(data)
    return blocks
