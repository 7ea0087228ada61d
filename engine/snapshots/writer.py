"""The writer: training copies its state and continues, a thread writes and commits the copy.

Snapshots are committed in the order in which they were taken. An error of the thread is kept until training asks for
it: with `check`, which costs nothing, at every step. A store that is silent for too long does not end the training:
the snapshot is dropped on all ranks, and its rows of the metric log go into the next one.

Best and last weights take the same way but are never dropped. If they cannot be written, they wait, and are written
before the next snapshot is committed: no snapshot names missing weights. Rank 0 writes them, or each rank its rows.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from midstride.engine.errors import SnapshotError, StoreSilent
from midstride.engine.snapshots.buffer_pool import Buffer, BufferPool
from midstride.engine.snapshots.catalog import Snapshot
from midstride.engine.snapshots.committer import Committer, SnapshotRequest
from midstride.engine.snapshots.lease import Lease
from midstride.engine.snapshots.metric_rows import join_segments
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.schedule import Retention, needed_weights
from midstride.engine.snapshots.state_copy import StateCopier, StateCopy
from midstride.engine.storage.store import Store
from midstride.engine.world import World

__all__ = ["PendingSnapshot", "Writer"]

log = logging.getLogger(__name__)


@dataclass
class PendingSnapshot:
    """A snapshot that is being written.

    Args:
        position: where the run stands.
        future: the snapshot once it is committed, or the error with which it failed.
        stall_s: seconds training was held up, those of `wait_s` included.
        wait_s: seconds it waited for an older snapshot to be written.
        write_s: seconds the thread took to write and commit it; 0 before.
    """

    position: Position
    future: "Future[Snapshot]"
    stall_s: float = 0.0
    wait_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True)
class _WriteJob:
    """A snapshot to be written, after the weights up to number `weights`."""

    pending: PendingSnapshot
    request: SnapshotRequest
    buffer: Buffer
    committed: "Committed"
    weights: int


Committed = Callable[[PendingSnapshot, Snapshot], object]


class Writer:
    """Takes the snapshots of one generation.

    Args:
        store: of the run.
        lease: of this generation.
        world: this process among the others.
        gather: returns the values that all ranks gave to it, by rank. A thread calls it while training continues, so it
            is a collective of no other part.
        run: name of the run, for the manifest.
        keep: how many snapshots stay.
        replicated: whether the tensor of a name is the same on every rank, and so is written once.
        archive_every_steps: keep one snapshot for good in each so many steps; None keeps none.
        shards_weights: whether every rank writes its rows of weights; else rank 0 writes them all.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        world: World,
        gather: Callable[[object], list[Any]],
        run: str,
        keep: int,
        replicated: Callable[[str], bool] = lambda path: False,
        archive_every_steps: int | None = None,
        shards_weights: bool = False,
    ) -> None:
        self._committer = Committer(store, lease, world, gather, run)
        self._retention = Retention(store, lease, keep, archive_every_steps) if world.is_first else None
        writers = (world, gather) if shards_weights else (World(), _alone)
        self._weights = _WeightsQueue(Committer(store, lease, *writers, run), self._retention)
        self._copier = StateCopier(world, replicated)
        self._buffers = BufferPool(store.options.on_wait)
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._last: PendingSnapshot | None = None
        self._newest: Snapshot | None = None
        self._failure: Exception | None = None
        self._dropped: dict[str, str] = {}  # since the newest was committed: name -> rows
        self._thread = threading.Thread(target=self._work, name="midstride-writer", daemon=True)
        self._thread.start()

    def take(
        self,
        position: Position,
        state: object,
        rows: str | Callable[[], str],
        facts: dict[str, Any],
        probe: Callable[[str], object] = lambda phase: None,
        committed: Committed = lambda pending, snapshot: None,
    ) -> PendingSnapshot:
        """Copy this rank's state and have it written; every rank calls this at the same position.

        Called again at the position of the one before, it waits for that one, and returns it unless it was dropped.

        Args:
            position: where the run stands.
            state: this rank's tree; it may change once this returns.
            rows: of the metric log since the snapshot before, or a function that returns them, which is called once the
                state is copied; rank 0's count.
            facts: JSON values for the manifest; rank 0's count.
            probe: called with "snapshot_write" and "before_commit", for injected faults; not in this thread.
            committed: called with the returned value and the snapshot, as soon as it is committed; not in this
                thread.

        Raises:
            UnsupportedState: the state of some rank cannot be written.
            Superseded: a newer generation advances the run.
            SnapshotError: some rank could not write an older snapshot; not for want of an answer, though.
        """
        self.check()
        if self._last is not None and self._last.position == position:
            was_dropped = self._was_dropped(self._last)
            self.check()  # ranks that came before its failure raise it as those that came later
            if not was_dropped:
                return self._last
        began = time.perf_counter()
        buffer, wait_s = self._buffers.acquire()
        try:
            copied: StateCopy | Exception = self._copier.copy(state, buffer)
        except Exception as error:
            copied = error  # the other ranks learn of it where they would have learned that the files are there
        stall_s = time.perf_counter() - began
        try:
            written = rows if isinstance(rows, str) else rows()
        except BaseException:
            self._buffers.release(buffer)
            raise
        self._weights.snapshot_taken(position)
        self._last = pending = PendingSnapshot(position, Future(), stall_s, wait_s)
        request = SnapshotRequest(position, copied, facts, written, probe)
        self._queue.put(partial(self._write, _WriteJob(pending, request, buffer, committed, self._weights.count)))
        if isinstance(copied, Exception):
            self.flush()
        return pending

    def save_weights(
        self,
        folder: str,
        position: Position,
        state_dict: dict[str, Any],
        facts: dict[str, Any],
        agreed: Callable[[Callable[[], None]], None] = lambda act: act(),
    ) -> str:
        """Copy and queue weights, which can change then; every rank that writes them calls this.

        No snapshot taken later is committed before they are written.

        Args:
            folder: "best" or "last".
            position: where the run stands.
            state_dict: of the module, as far as this rank writes it; tensors may be tied or lie in memory in any order.
            facts: JSON values for the manifest, such as the metrics that the weights reached.
            agreed: calls a function, and raises the error of any rank in it.

        Returns:
            The name that they have once they are written.

        Raises:
            UnsupportedState: they hold values that cannot be written.
        """
        copied: list[tuple[StateCopy, Buffer]] = []
        agreed(lambda: copied.append(self._weights.copy(state_dict)))
        name = self._weights.put(folder, position, copied[0], facts)
        self._queue.put(partial(self._flush_weights, self._weights.count))
        return name

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being written."""
        return self._last is not None and not self._last.future.done()

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot that this writer has committed."""
        return self._newest

    @property
    def failure(self) -> Exception | None:
        """The error of the thread that writes, if there was one."""
        return self._failure

    def check(self) -> None:
        """Raise the error of the thread that writes, the same on every rank."""
        if self._failure is not None:
            raise self._failure

    def flush(self) -> None:
        """Wait until everything taken is committed; raise the error of the last part, if any."""
        self._in_turn(lambda: None)
        failure = self._last.future.exception() if self._last is not None else None
        self.check()
        if failure is not None:
            raise failure

    def flush_weights(self) -> None:
        """Wait until the weights given to `save_weights` are written; raises why they are not."""
        self._in_turn(partial(self._weights.flush, self._weights.count))

    def _in_turn(self, act: Callable[[], object]) -> None:
        """Have the thread call `act` after its queue; raise its errors."""
        done: Future[None] = Future()

        def settle() -> None:
            try:
                act()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._queue.put(settle)
        done.result()

    def trust(self, step: int) -> None:
        """Keep the newest snapshot up to `step`."""
        if self._retention is not None:
            self._retention.trust(step)

    def close(self, grace_s: float | None = None) -> bool:
        """Let the thread end after writing all parts; return whether it did.

        Never raises.

        Args:
            grace_s: seconds it gets; then it is left behind, without its uncommitted snapshots.
        """
        self._queue.put(None)
        self._thread.join(grace_s)
        if self._thread.is_alive():
            return False
        self._committer.close()
        self._weights.close()
        return True

    def _work(self) -> None:
        while (act := self._queue.get()) is not None:
            act()

    def _write(self, job: _WriteJob) -> None:
        began = time.perf_counter()
        request = self._with_dropped(job.request)
        failure: Exception | None = None
        snapshot: Snapshot | None = None
        try:
            if self._failure is not None:
                raise SnapshotError(f"an older snapshot was not taken: {self._failure}") from self._failure
            self._newest = snapshot = self._committer.commit(request, before=partial(self._weights.flush, job.weights))
            self._dropped.clear()
            job.pending.write_s = time.perf_counter() - began
            job.committed(job.pending, snapshot)
        except StoreSilent as error:
            failure = error
            self._drop(job.request, error)
        except Exception as error:
            failure = error
            self._failure = self._failure or error
        self._weights.snapshot_over(request.position)
        self._buffers.release(job.buffer)  # before it is announced: the next copy needs no other buffer
        if failure is not None or snapshot is None:
            job.pending.future.set_exception(failure)
            return
        job.pending.future.set_result(snapshot)
        if self._retention is not None:
            self._retention.add(snapshot, request.rows, self._weights.pending)

    def _flush_weights(self, count: int) -> None:
        try:
            self._weights.flush(count)
        except Exception as error:
            log.warning(
                "weights were not written: %s: %s. They are kept, and written before the next snapshot is committed",
                type(error).__name__,
                error,
            )

    @staticmethod
    def _was_dropped(pending: PendingSnapshot) -> bool:
        """Wait for the end of a snapshot; return whether it was dropped."""
        return isinstance(pending.future.exception(), StoreSilent)

    def _drop(self, request: SnapshotRequest, error: StoreSilent) -> None:
        name = self._committer.name_of(request)
        before = self._dropped.get(name)  # of the one that was taken anew at its position
        rows = request.rows or ""
        self._dropped[name] = rows if before is None else join_segments([before, rows])
        since = f"snapshot {self._newest.name}" if self._newest else "this attempt began"
        log.warning("%s. It is dropped and training continues; a failure now loses the steps since %s", error, since)

    def _with_dropped(self, request: SnapshotRequest) -> SnapshotRequest:
        """Return `request` with the rows of the metric log that only dropped snapshots had."""
        if not self._dropped:
            return request
        rows = join_segments([*self._dropped.values(), request.rows or ""])
        return replace(request, rows=rows, dropped=[*self._dropped])


@dataclass(eq=False)
class _Waiting:
    """Weights that were copied and wait to be written."""

    number: int
    request: SnapshotRequest
    buffer: Buffer


class _WeightsQueue:
    """Queue of weights for `best` and `last`: the training thread puts, the writing one flushes.

    Of the weights that wait, only those stay that the newest state or a pending snapshot needs. Ranks may find that at
    different times, so they agree on those to write: what one of them has dropped, none needs.

    Args:
        committer: writes them; all its ranks put and flush in the same order.
        retention: removes older ones; None on other ranks than the first.
    """

    def __init__(self, committer: Committer, retention: Retention | None) -> None:
        self._committer, self._retention = committer, retention
        self._copier = StateCopier(World(), lambda path: False)
        #: how many weights were put
        self.count = 0
        self._open: list[int] = []  # numbers of those that are neither written nor dropped by all
        self._waiting: list[_Waiting] = []  # oldest first
        self._newest: dict[str, SnapshotRequest] = {}  # by folder
        self._pending: list[Position] = []
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    @property
    def pending(self) -> list[Position]:
        """Positions of the snapshots that were taken and are not committed yet."""
        with self._lock:
            return [*self._pending]

    def snapshot_taken(self, position: Position) -> None:
        """Note that a snapshot was taken: the weights before it belong to it."""
        with self._lock:
            self._pending.append(position)

    def snapshot_over(self, position: Position) -> None:
        """Note that the snapshot at `position` was committed, or never will be."""
        with self._lock:
            self._pending.remove(position)

    def copy(self, state_dict: dict[str, Any]) -> tuple[StateCopy, Buffer]:
        """Copy weights to memory that no others are in."""
        with self._lock:
            buffer = self._free.pop() if self._free else Buffer()
        return self._copier.copy(state_dict, buffer), buffer

    def put(self, folder: str, position: Position, copied: tuple[StateCopy, Buffer], facts: dict[str, Any]) -> str:
        """Add copied weights; return the name that they get."""
        state, buffer = copied
        with self._lock:
            before = self._newest.get(folder)
            take = before.take + 1 if before is not None and before.position == position else 1
            self._newest[folder] = request = SnapshotRequest(position, state, facts, folder=folder, take=take)
            self.count += 1
            self._open.append(self.count)
            self._waiting.append(_Waiting(self.count, request, buffer))
            self._drop_unneeded()
        return self._committer.name_of(request)

    def flush(self, count: int) -> None:
        """Write the waiting weights up to number `count`; those not written for an error wait on."""
        left = self._taken(count)
        if left is None:
            return
        try:
            everyone = self._committer.exchange("weights were not written", [one.number for one in left])
            left = self._agreed(left, everyone)
            while left:
                committed = self._committer.commit(left[0].request, before=lambda: None)
                with self._lock:
                    self._free.append(left.pop(0).buffer)
                if self._retention is not None:
                    self._retention.add(committed, pending=self.pending)
        except BaseException:
            with self._lock:
                self._waiting[:0] = left
                self._open[:0] = [one.number for one in left]
                self._drop_unneeded()
            raise

    def _taken(self, count: int) -> list[_Waiting] | None:
        """Take weights up to number `count` out of the queue, where none is dropped any more.

        None if all of them are over on every rank.
        """
        with self._lock:
            taken = [one for one in self._waiting if one.number <= count]
            is_over = all(number > count for number in self._open)
            self._waiting = [one for one in self._waiting if one.number > count]
            self._open = [number for number in self._open if number > count]
        return None if is_over else taken

    def _agreed(self, taken: list[_Waiting], everyone: list[list[int]]) -> list[_Waiting]:
        """Return those of `taken` that no rank has dropped."""
        shared = set(everyone[0]).intersection(*everyone)
        with self._lock:
            self._free += [one.buffer for one in taken if one.number not in shared]
        return [one for one in taken if one.number in shared]

    def close(self) -> None:
        """End the thread that computes checksums."""
        self._committer.close()

    def _drop_unneeded(self) -> None:
        needed: list[_Waiting] = []
        for folder in self._newest:
            own = [one for one in self._waiting if one.request.folder == folder]
            numbers = needed_weights([one.request.position for one in own], self._pending)
            needed += [own[number] for number in numbers]
        self._free += [one.buffer for one in self._waiting if one not in needed]
        self._waiting = [one for one in self._waiting if one in needed]


def _alone(value: object) -> list[Any]:
    """Return the values of all ranks that write weights, where rank 0 does so alone."""
    return [value]
