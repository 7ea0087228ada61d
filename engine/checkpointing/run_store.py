"""Folder of a run during one fit: snapshot to resume, snapshots, weights, metric log."""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

from midstride.engine.errors import (
    EngineError,
    NotExact,
    SnapshotDamaged,
    SnapshotError,
    SnapshotMissing,
    StoreSilent,
    UserError,
)
from midstride.engine.formatting import url_name
from midstride.engine.processes.process_identity import process_identity
from midstride.engine.session.attempts import AttemptLog, fatal_snapshots
from midstride.engine.session.heartbeat import Heartbeat, Phase
from midstride.engine.session.session import Session
from midstride.engine.snapshots.beat import beating, ensure_none_elsewhere
from midstride.engine.snapshots.catalog import (
    MANIFEST,
    RUN_FILES,
    RUN_FOLDERS,
    WEIGHTS,
    Catalog,
    Snapshot,
    SnapshotCatalog,
)
from midstride.engine.snapshots.holder import ensure_free, held, holder_facts
from midstride.engine.snapshots.lease import Lease, acquire, ensure_newest
from midstride.engine.snapshots.parent import PARENT, parent_of, with_parent
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.reader import SnapshotReader, unread
from midstride.engine.snapshots.weights import missing_weights
from midstride.engine.snapshots.weights_rebuild import weights_in
from midstride.engine.snapshots.writer import PendingSnapshot, Writer
from midstride.engine.state.tensor_file import Run
from midstride.engine.storage.store import Store, StoreOptions
from midstride.engine.storage.urls import absolute_url, url_fault
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import SideChannel
from midstride.engine.strategies.mixins import ModelParallel, ShardsWeights

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
        raise UserError(f'run={run!r}: name the folder or URL of a run, such as "runs/first"; None keeps nothing')
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

    def ensure_free(self, say: Callable[[str], object]) -> None:
        """Check that no other process advances the run, on this machine or another one.

        Args:
            say: called with a line before rank 0 watches for up to half a minute.

        Raises:
            RunHeld: one does.
        """

        def ensure() -> None:
            ensure_free(self.store)
            ensure_none_elsewhere(self.store, say)

        self._on_rank0(ensure)

    def resume(
        self, resume: Resume, merged: Collection[str], probe: Callable[[str], object] = lambda phase: None
    ) -> tuple[Snapshot, list[Any]] | None:
        """Return the snapshot to resume from, and trees in it; None for a fresh start.

        It is the newest one whose every byte was verified, each by one rank; others are set aside. The trees are this
        rank's alone, with whole tensors in place of its rows if this strategy does not shard; or, in a world of another
        size, those of all old ranks, with this rank's rows of sharded tensors.

        Args:
            resume: which snapshot.
            merged: parts of the trees that are merged from all old ranks; of others, rank 0's alone is read.
            probe: called with each of `RESUME_PHASES`, for injected faults.

        Raises:
            SnapshotMissing: `resume` is a step without a good snapshot.
        """
        trees: list[Any] = []

        def read(snapshot: Snapshot) -> EngineError | None:
            trees.clear()  # before the next ones are read
            fault, found = self._read(snapshot, partial(self._plan, merged=merged), probe)
            trees.extend(found)
            return fault

        snapshot = self._agreed(lambda verify: self._choose(resume, verify), read)
        if snapshot is None:
            return None
        self._on_rank0(partial(self._warn_of_damages, snapshot))
        for fault in self._on_rank0(lambda: missing_weights(self.store, snapshot)).values():
            if self._strategy.world.is_first:
                log.warning("%s: older ones count, or none", fault)
        return snapshot, trees

    def trees_of(self, snapshot: Snapshot, merged: Collection[str]) -> list[Any]:
        """Return once more the trees in a snapshot that `resume` returned.

        Raises:
            SnapshotError: it was damaged since.
        """
        reader = SnapshotReader(self.store, snapshot)
        with self._waiting():
            self._plan(reader, merged)
            reader.read()
            return reader.trees()

    def _plan(self, reader: SnapshotReader, merged: Collection[str]) -> None:
        """Plan the trees that this rank needs.

        Raises:
            NotExact: the strategy shards tensors that the snapshot has whole.
        """
        strategy, is_same_size = self._strategy, reader.world_size == self._strategy.world.size
        is_sharded = reader.has_sharded_weights(strategy.world.rank if is_same_size else 0)
        if isinstance(strategy, ShardsWeights) and not is_sharded:
            raise NotExact(
                f"{reader.where} was taken under a strategy without sharding, and {strategy.name} cannot shard its "
                "state. Resume with the former strategy, or start a new run and load the weights of this one."
            )
        becomes_whole = is_sharded and not isinstance(strategy, ModelParallel)
        if not is_same_size:
            rank, size = strategy.row_shard if isinstance(strategy, ModelParallel) else (0, 1)
            reader.plan_merged(rank, size, merged, as_tensors=becomes_whole)
        elif becomes_whole:  # no part is merged: what differs between the ranks stays apart
            reader.plan_whole(strategy.world.rank)
        else:
            reader.plan(strategy.world.rank)

    def _read(
        self,
        snapshot: Snapshot,
        plan: Callable[[SnapshotReader], None] = lambda reader: None,
        probe: Callable[[str], object] = lambda phase: None,
    ) -> tuple[EngineError | None, list[Any]]:
        """Read the planned trees; the ranks verify all other bytes together. Every rank calls this.

        Returns the first error of a rank, the same on all of them, and the trees.
        """
        reader, world = SnapshotReader(self.store, snapshot), self._strategy.world

        def planned() -> dict[str, list[Run]]:
            probe("resume_plan")
            plan(reader)
            return reader.runs

        def read() -> None:
            probe("resume_read")
            reader.read(unread(snapshot, everyone, world.rank, world.size))
            trees.extend(reader.trees())
            probe("resume_agree")

        trees: list[Any] = []
        everyone, fault = self._exchange(planned)
        if fault is None:
            _, fault = self._exchange(read)
        return fault, trees

    def _agreed(
        self,
        choose: Callable[[Callable[[Snapshot], None]], Snapshot | None],
        read: Callable[[Snapshot], EngineError | None],
    ) -> Snapshot | None:
        """Return the snapshot that rank 0 chooses, which every rank has read; every rank calls this.

        Args:
            choose: called on rank 0 with a function that has all ranks call `read`, and raises what that returns.
            read: returns the first error of a rank, the same on all.
        """
        broadcast = self._strategy.collective.broadcast

        def choose_with_all() -> Snapshot | None:
            try:
                chosen = choose(partial(self._read_by_all, read))
            except Exception as error:
                if not self._strategy.collective.is_peer_failure(error):
                    broadcast(None)
                raise
            broadcast(None)
            return chosen

        if not self._strategy.world.is_first:
            while (candidate := broadcast(None)) is not None:
                read(candidate)
        return self._on_rank0(choose_with_all)

    def _read_by_all(self, read: Callable[[Snapshot], EngineError | None], snapshot: Snapshot) -> None:
        """Have all ranks `read` a snapshot, and raise the first error of one; rank 0 calls this."""
        self._strategy.collective.broadcast(snapshot)
        fault = read(snapshot)
        if isinstance(fault, SnapshotDamaged) and not self.store.exists(f"{snapshot.path}/{MANIFEST}"):
            raise SnapshotMissing(
                f"{self.store.url}/{snapshot.path} was removed while it was read: try again"
            ) from fault
        if fault is not None:
            raise fault

    def verify_best(self) -> None:
        """Set the best weights of an earlier attempt aside if they are damaged.

        All ranks call this, and read them together.
        """
        catalog, generation = Catalog(self.store, "best"), self.lease.generation if self.lease is not None else 0

        def choose(verify: Callable[[Snapshot], None]) -> Snapshot | None:
            return catalog.newest_good(lambda best: None if best.generation == generation else verify(best))

        self._agreed(choose, lambda best: self._read(best)[0])

    def _warn_of_damages(self, snapshot: Snapshot) -> None:
        """Warn of damaged files other than `snapshot`, which do not prevent a resume.

        Weights are not restored, so only their sizes are compared here.
        """
        faults = self._catalog.set_damaged_aside(before=snapshot)
        for catalog in (Catalog(self.store, folder) for folder in WEIGHTS):
            catalog.newest_good(partial(catalog.verify, sizes_only=True))
        for fault in faults:
            log.warning("%s: metrics.csv will have a gap, unless it has these rows. The training continues", fault)

    def newest_facts(self) -> dict[str, Any]:
        """Return the facts of the newest snapshot; {} if there is none."""

        def facts() -> dict[str, Any]:
            newest = self._catalog.newest_readable()
            return dict(newest.manifest["facts"]) if newest else {}

        return self._on_rank0(facts)

    def _choose(self, resume: Resume, verify: Callable[[Snapshot], None]) -> Snapshot | None:
        if resume == "never":
            return None
        if resume == "auto":
            self._set_fatal_aside()
            if (newest := self._catalog.newest_good(verify)) is None:
                self._ensure_parent()
            return newest
        found = [snapshot for snapshot in self._catalog.snapshots() if snapshot.position.step == resume]
        if not found:
            steps = ", ".join(str(s.position.step) for s in self._catalog.snapshots()) or "none"
            raise SnapshotMissing(f"no snapshot of step {resume} in {self.store.url}; choose one of {steps}")
        verify(found[-1])
        return found[-1]

    def _ensure_parent(self) -> None:
        """Refuse to start a fork over if its parent no longer exists."""
        if (parent := parent_of(self.store)) is not None:
            raise SnapshotMissing(
                f"{self.store.url} is a fork of {parent.url_from(self.store.url)}, and snapshot {parent.snapshot} no "
                f"longer exists: restore it, or fork again from another step"
            )

    def _set_fatal_aside(self) -> None:
        """Set aside snapshots after whose resume attempts died before a step; never the oldest one."""
        fatal = fatal_snapshots(AttemptLog(self.store).attempts())
        older = [snapshot.name for snapshot in self._catalog.snapshots()][1:] if fatal else []
        for name, attempts in fatal.items():
            if name in older:
                numbers = " and ".join(map(str, attempts))
                reason = f"attempts {numbers} resumed from it and died before their first new step"
                log.warning("snapshot %s is set aside, an older one is taken: %s", name, reason)
                self._catalog.set_aside(name, reason)

    def begin(self, resumed_from: Snapshot | None) -> Lease:
        """Acquire the lease of the next generation, which supersedes older attempts of this run."""
        facts = {**process_identity(), **holder_facts()}
        name = resumed_from.name if resumed_from else None
        if self.store.options.lease == "none" and self._strategy.world.is_first:
            log.warning(
                "snapshots.lease is none: nothing stops a second attempt from writing to %s at the same time, which "
                "would mix both. Ensure that only one runs",
                self.store.url,
            )
        self.lease = lease = self._on_rank0(lambda: acquire(self.store, name, facts))
        if self._strategy.world.is_first:
            self._held.enter_context(held(lease))
            if Session.from_environment() is None:  # else its launcher does
                self._held.enter_context(beating(self.store))
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
            shards_weights=self._shards_weights,
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
            raise RuntimeError("call begin() before snapshot()")
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
        """Write weights in the background on the ranks that hold them; return their name there.

        Arguments as of `Writer.save_weights`. `flush_weights` waits for them.

        Raises:
            UnsupportedState: those of some rank cannot be written.
        """
        if self._writer is None:
            return ""
        if self._shards_weights:
            return self._writer.save_weights(folder, position, state_dict, facts, self._on_every_rank)
        if not self._strategy.world.is_first:
            return ""
        with self._waiting():
            return self._writer.save_weights(folder, position, state_dict, facts)

    def _on_every_rank(self, act: Callable[[], None]) -> None:
        """Call `act` on every rank; raise the first error of one on all."""
        _, fault = self._exchange(act)
        if fault is not None:
            raise fault

    @property
    def _shards_weights(self) -> bool:
        return isinstance(self._strategy, ShardsWeights)

    def newest_weights(self) -> dict[str, Any]:
        """Return the whole weights in the newest snapshot; {} on ranks that need not write them.

        Raises:
            SnapshotError: there is no snapshot, or no rank has all of them.
        """
        if (snapshot := self._catalog.newest()) is None:
            raise SnapshotMissing(f"no snapshot in {self.store.url}")
        return weights_in(self.store, snapshot) if self._strategy.world.is_first else {}

    def flush_weights(self) -> None:
        """Wait until the weights are written; an error is raised on every rank."""
        if (writer := self._writer) is not None and self._shards_weights:
            self._on_every_rank(writer.flush_weights)
        elif writer is not None:
            self._on_rank0(writer.flush_weights)

    def write(self, path: str, text: str) -> None:
        """Replace a small text file of the run; rank 0 writes."""
        self._replace(path, lambda: text)

    def assemble_metric_log(self) -> None:
        """Write `metrics.csv` for users, from the rows in committed snapshots."""
        self._replace("metrics.csv", self._catalog.metric_log)

    def trust(self, step: int) -> None:
        """Keep the newest snapshot up to `step`, whose two executions were equal."""
        if self._writer is not None:
            self._writer.trust(step)

    def distrust(self, trusted_step: int) -> str:
        """Set own snapshots after `trusted_step` aside; return the one to resume from as text."""
        self.flush()
        return self._on_rank0(lambda: self._distrust(trusted_step))

    def _distrust(self, trusted_step: int) -> str:
        generation = self.lease.generation if self.lease is not None else 0
        for snapshot in self._catalog.snapshots():
            if snapshot.generation == generation and snapshot.position.step > trusted_step:
                self._catalog.set_aside_with_warning(snapshot.name, f"no step after {trusted_step} was verified")
        kept = self._catalog.newest_readable()
        return f"a retry resumes from snapshot {kept.name}" if kept else "a retry starts over"

    def resume_message(self) -> str:
        """Return text that names the snapshot from which the next attempt resumes."""
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
        result = self._result_of(act) if self._strategy.world.is_first else (None, None)
        value: T
        value, failure = self._strategy.collective.broadcast(result)
        if failure is not None:
            raise failure
        return value

    def _exchange(self, act: Callable[[], T]) -> tuple[list[T], EngineError | None]:
        """Call `act` on every rank; return the results by rank, and the first error of one."""
        answers = self._strategy.collective.gather(self._result_of(act))
        return [result for result, _ in answers], next((error for _, error in answers if error is not None), None)

    def _result_of(self, act: Callable[[], T]) -> tuple[T | None, EngineError | None]:
        """Return the result of `act`, or its error."""
        try:
            with self._waiting():
                return act(), None
        except EngineError as error:
            return None, error
        except Exception as error:
            if self._strategy.collective.is_peer_failure(error):
                raise
            if not isinstance(error, OSError):  # whose message is enough
                log.exception("in %s", self.store.url)
            return None, self._worded(error)

    def _worded(self, error: Exception) -> EngineError:
        """Return `error` as the store's fault, or as that of the code, which no store raises."""
        if isinstance(error, _FAULTS_OF_CODE):
            what = f"{type(error).__name__}: {error}"
            return EngineError(f"a bug in midstride itself, not damage in {self.store.url}, is in the log: {what}")
        kind = StoreSilent if self.store.is_transient(error) else SnapshotError
        return self.store.advice(error) or kind(f"{self.store.url}: {type(error).__name__}: {error}")
