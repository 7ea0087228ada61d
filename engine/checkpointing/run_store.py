"""Folder of a run during one fit: snapshot to resume, snapshots, weights, metric log."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

from midstride.engine.errors import EngineError, SnapshotError, SnapshotMissing, StoreSilent, UserError
from midstride.engine.formatting import url_name
from midstride.engine.processes.process_identity import process_identity
from midstride.engine.session.attempts import AttemptLog, fatal_snapshots
from midstride.engine.session.heartbeat import Heartbeat, Phase
from midstride.engine.snapshots.catalog import RUN_FILES, RUN_FOLDERS, WEIGHTS, Catalog, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.holder import ensure_free, held, holder_facts
from midstride.engine.snapshots.lease import Lease, acquire, ensure_newest
from midstride.engine.snapshots.parent import PARENT, parent_of, with_parent
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.weights import missing_weights
from midstride.engine.snapshots.weights_rebuild import weights_in
from midstride.engine.snapshots.writer import PendingSnapshot, Writer
from midstride.engine.storage.store import Store, StoreOptions
from midstride.engine.storage.urls import absolute_url, url_fault
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import SideChannel

__all__ = ["Resume", "RunStore", "run_url_of"]

Resume = Literal["auto", "never"] | int
T = TypeVar("T")
log = logging.getLogger(__name__)

#: seconds that a failed run waits for snapshots that are still being written
GRACE_S = 10.0
_FAULTS_OF_CODE = (TypeError, AttributeError, NameError, LookupError, AssertionError)


def run_url_of(run: object) -> str:
    """Return the URL of the run that a script calls `run`; a path is made absolute.

    Raises:
        UserError: it names no folder.
    """
    if not isinstance(run, (str, os.PathLike)) or not os.fspath(run):
        raise UserError(f'run={run!r}: the folder or URL of a run is needed, such as "runs/first"; None keeps nothing')
    if fault := url_fault(os.fspath(run)):
        raise UserError(f"run: {fault}")
    return absolute_url(os.fspath(run))


class RunStore:
    """The folder of a run, as used by one rank of one generation.

    Args:
        url: folder or fsspec URL of the run.
        strategy: strategy whose ranks share the run.
        keep: number of snapshots to keep.
        heartbeat: reports that this rank waits for the store.
        options: how the store is used.
        archive_every_steps: keep one snapshot for good in each so many steps; None keeps none.
    """

    def __init__(
        self,
        url: str,
        strategy: Strategy,
        keep: int,
        heartbeat: Heartbeat,
        options: StoreOptions | None = None,
        archive_every_steps: int | None = None,
    ) -> None:
        self.name = url_name(url)
        self.store = Store.open(url, options)
        self._strategy, self._keep, self._heartbeat = strategy, keep, heartbeat
        self._archive_every_steps = archive_every_steps
        self._writer: Writer | None = None
        self._channel: SideChannel | None = None
        self.lease: Lease | None = None
        self._held = ExitStack()
        self._on_rank0(partial(self.store.ensure_writable, RUN_FOLDERS, RUN_FILES))
        if self._on_rank0(lambda: self.store.exists(PARENT)):
            self.store = with_parent(self.store)
        self._catalog = SnapshotCatalog(self.store)

    def ensure_free(self) -> None:
        """Check that no other process on this machine advances the run.

        Raises:
            RunHeld: one does.
        """
        self._on_rank0(partial(ensure_free, self.store))

    def resume(self, resume: Resume) -> tuple[Snapshot, Any] | None:
        """Return the snapshot to resume from and this rank's tree in it; None to start anew.

        It is the newest one that every rank could verify; others are set aside. In a world of another size, every
        rank gets the tree of rank 0; `other_trees` yields the others.

        Raises:
            SnapshotMissing: `resume` is a step without a good snapshot.
        """
        while (snapshot := self._on_rank0(lambda: self._choose(resume))) is not None:
            with self._waiting():
                tree, fault = self._read(snapshot)
            faults = [text for text in self._strategy.collective.gather(fault) if text]
            if not faults:
                self._on_rank0(lambda: self._warn_of_damages(snapshot))
                return snapshot, tree
            self._on_rank0(partial(self._catalog.set_aside_with_warning, snapshot.name, faults[0]))
        return None

    def _warn_of_damages(self, snapshot: Snapshot) -> None:
        """Warn of damaged files other than `snapshot`, which do not prevent a resume."""
        self._catalog.set_damaged_aside(before=snapshot)
        for fault in self._catalog.log_faults():
            log.warning("%s: metrics.csv will have a gap, unless it has these rows. The training continues", fault)
        for folder in WEIGHTS:
            Catalog(self.store, folder).newest_good()
        for fault in missing_weights(self.store, snapshot).values():
            log.warning("%s: older ones count, or none", fault)

    def newest_facts(self) -> dict[str, Any]:
        """Return the facts of the newest snapshot; {} if there is none."""

        def facts() -> dict[str, Any]:
            snapshots = self._catalog.snapshots()
            return dict(snapshots[-1].manifest["facts"]) if snapshots else {}

        return self._on_rank0(facts)

    def _choose(self, resume: Resume) -> Snapshot | None:
        if resume == "never":
            return None
        if resume == "auto":
            self._set_fatal_aside()
            if (newest := self._catalog.newest_good()) is None:
                self._ensure_parent()
            return newest
        found = [snapshot for snapshot in self._catalog.snapshots() if snapshot.position.step == resume]
        if not found:
            steps = ", ".join(str(s.position.step) for s in self._catalog.snapshots()) or "none"
            raise SnapshotMissing(f"no snapshot of step {resume} in {self.store.url}; there are those of: {steps}")
        self._catalog.verify(found[-1])
        return found[-1]

    def _ensure_parent(self) -> None:
        """Refuse to start a fork over whose parent has gone."""
        if (parent := parent_of(self.store)) is not None:
            raise SnapshotMissing(
                f"{self.store.url} is a fork of {parent.url_from(self.store.url)}, and snapshot {parent.snapshot} is "
                "no longer there: put it back, or fork again from another step"
            )

    def _set_fatal_aside(self) -> None:
        """Set aside snapshots after whose resume attempts died before a step; never the oldest one."""
        older = [snapshot.name for snapshot in self._catalog.snapshots()][1:]
        for name, attempts in fatal_snapshots(AttemptLog(self.store).attempts()).items():
            if name in older:
                numbers = " and ".join(map(str, attempts))
                reason = f"attempts {numbers} resumed from it and died before their first new step"
                log.warning("snapshot %s is set aside, an older one is taken: %s", name, reason)
                self._catalog.set_aside(name, reason)

    def _read(self, snapshot: Snapshot) -> tuple[Any, str]:
        world = self._strategy.world
        try:
            # In a world of another size, merging starts with the tree of rank 0.
            return read(self.store, snapshot, world.rank if snapshot.manifest["world_size"] == world.size else 0), ""
        except SnapshotError as error:
            return None, str(error)

    def tree_of(self, snapshot: Snapshot) -> Any:
        """Return this rank's tree in a snapshot that `resume` returned.

        Raises:
            SnapshotError: it was damaged since.
        """
        with self._waiting():
            tree, fault = self._read(snapshot)
        if fault:
            raise SnapshotError(fault)
        return tree

    def other_trees(self, snapshot: Snapshot) -> Iterator[Any]:
        """Yield the trees of ranks 1, 2, ... of `snapshot`, for a world of another size."""
        for rank in range(1, snapshot.manifest["world_size"]):
            with self._waiting():
                tree = read(self.store, snapshot, rank)
            yield tree

    def begin(self, resumed_from: Snapshot | None) -> Lease:
        """Acquire the lease of the next generation, which supersedes older attempts of this run."""
        facts = {**process_identity(), **holder_facts()}
        name = resumed_from.name if resumed_from else None
        if self.store.options.lease == "none" and self._strategy.world.is_first:
            log.warning(
                "snapshots.lease is none: nothing keeps a second world from advancing %s; what two of them "
                "write is one mess",
                self.store.url,
            )
        self.lease = lease = self._on_rank0(lambda: acquire(self.store, name, facts))
        if self._strategy.world.is_first:
            self._held.enter_context(held(lease))
        self._channel = channel = self._strategy.collective.side_channel()
        self._writer = Writer(
            self.store,
            lease,
            self._strategy.world,
            gather=channel.gather,
            run=self.name,
            keep=self._keep,
            replicated=self._strategy.is_replicated,
            archive_every_steps=self._archive_every_steps,
        )
        return lease

    def snapshot(
        self,
        position: Position,
        state: object,
        rows: str | Callable[[], str],
        facts: dict[str, Any],
        probe: Callable[[str], object],
        committed: Callable[[PendingSnapshot, Snapshot], object],
    ) -> PendingSnapshot:
        """Take a snapshot, which a thread commits in the background; arguments as of `Writer.take`."""
        if self._writer is None:
            raise RuntimeError("begin() comes before snapshot()")
        with self._waiting():
            return self._writer.take(position, state, rows, facts, probe, committed)

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is being written."""
        return self._writer is not None and self._writer.is_busy

    def check(self) -> None:
        """Raise the error of the writing thread, if there was one."""
        if self._writer is not None:
            self._writer.check()

    def flush(self) -> None:
        """Wait until all snapshots are committed; raises as `check` does."""
        if self._writer is not None:
            with self._waiting():
                self._writer.flush()

    def save_weights(self, folder: str, position: Position, state_dict: dict[str, Any], facts: dict[str, Any]) -> str:
        """Write weights in the background on rank 0; return their name.

        Arguments as of `Writer.save_weights`.

        `flush_weights` waits for them.
        """
        if self._writer is None or not self._strategy.world.is_first:
            return ""
        with self._waiting():
            return self._writer.save_weights(folder, position, state_dict, facts)

    def newest_weights(self) -> dict[str, Any]:
        """Return the whole weights in the newest snapshot.

        Raises:
            SnapshotError: there is no snapshot, or no rank has all of them.
        """
        if (snapshot := self._catalog.newest()) is None:
            raise SnapshotMissing(f"no snapshot in {self.store.url}")
        return weights_in(self.store, snapshot)

    def flush_weights(self) -> None:
        """Wait until the weights are written; an error is raised on every rank."""
        if (writer := self._writer) is not None:
            self._on_rank0(writer.flush_weights)

    def write(self, path: str, text: str) -> None:
        """Replace a small text file of the run; rank 0 writes."""
        self._replace(path, lambda: text)

    def assemble_metric_log(self) -> None:
        """Write `metrics.csv` for users, from the rows in committed snapshots."""
        self._replace("metrics.csv", self._catalog.metric_log)

    def resume_message(self) -> str:
        """Return text that says what the next attempt of this run resumes from."""
        newest = self._writer.newest if self._writer is not None else None
        name = newest.name if newest else self.lease.resumed_from if self.lease else None
        return f"the run resumes from snapshot {name}" if name else "the run has no snapshot and starts over"

    def close(self, grace_s: float = GRACE_S) -> Exception | None:
        """Wait up to `grace_s` for pending writes; return the writer's error.

        They cannot end if ranks died.
        """
        self._held.close()
        writer, channel = self._writer, self._channel
        self._writer = self._channel = None
        if writer is None or channel is None:
            return None
        with self._waiting():
            ended = writer.close(grace_s)
        if ended:
            channel.close()
        return writer.failure

    def _replace(self, path: str, text: Callable[[], str]) -> None:
        """Replace a small text file on rank 0, if no newer world has taken over the run."""

        def check() -> None:
            if self.lease is not None:
                ensure_newest(self.store, self.lease)

        self._on_rank0(lambda: self.store.write(path, text().encode(), check=check))

    def _waiting(self) -> AbstractContextManager[None]:
        return self._heartbeat.during(Phase.WAITING)

    def _on_rank0(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0; return its result, or raise its error, on every rank."""
        result: tuple[Any, EngineError | None] = None, None
        if self._strategy.world.is_first:
            try:
                with self._waiting():
                    result = act(), None
            except EngineError as error:
                result = None, error
            except Exception as error:
                result = None, self._worded(error)
                if not isinstance(error, OSError):  # whose message is enough
                    log.exception("in %s", self.store.url)
        value: T
        value, failure = self._strategy.collective.broadcast(result)
        if failure is not None:
            raise failure
        return value

    def _worded(self, error: Exception) -> EngineError:
        """Return `error` as the store's fault, or as that of the code, which no store raises."""
        if isinstance(error, _FAULTS_OF_CODE):
            what = f"{type(error).__name__}: {error}"
            return EngineError(f"a fault in midstride itself, not in {self.store.url}, is in the log: {what}")
        kind = StoreSilent if self.store.is_transient(error) else SnapshotError
        return self.store.advice(error) or kind(f"{self.store.url}: {type(error).__name__}: {error}")
