"""The writer: training copies its state and goes on, a thread behind it writes and commits.

Snapshots are committed one after another, in the order in which they were taken. What goes wrong behind training is
kept until training asks: with `check`, which costs nothing, at every step. A store that is silent for too long does not
end the training: that snapshot is dropped, on every rank, and what only it had goes into the next. Best and last
weights go the same way, but are never dropped.
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
from midstride.engine.snapshots.retention import Retention
from midstride.engine.snapshots.staging import Staged, Stager
from midstride.engine.snapshots.weights import WeightsRequest
from midstride.engine.snapshots.weights_queue import WeightsQueue
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
    pending: PendingSnapshot
    request: SnapshotRequest
    buffer: Buffer
    committed: "Committed"


Committed = Callable[[PendingSnapshot, Snapshot], object]


class Writer:
    """Takes the snapshots of one generation.

    Args:
        store: of the run.
        lease: of this generation.
        world: this process among the others.
        gather: returns the values that all ranks gave to it, by rank. A thread calls it while training goes on, so it
            is a collective of no other part.
        run: name of the run, for the manifest.
        keep: how many snapshots stay.
        replicated: whether the tensor of a name is the same on every rank, and so is written once.
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
    ) -> None:
        self._committer = Committer(store, lease, world, gather, run)
        self._weights_queue = WeightsQueue(store, lease)
        self._retention = Retention(store, lease, keep, self._weights_queue.sweep) if world.is_first else None
        self._stager = Stager(world, replicated)
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
        rows: str,
        facts: dict[str, Any],
        probe: Callable[[str], object] = lambda phase: None,
        committed: Committed = lambda pending, snapshot: None,
    ) -> PendingSnapshot:
        """Copy this rank's state and have it written; every rank calls this at the same position.

        Called again at the position of the one before, it returns that one.

        Args:
            position: where the run stands.
            state: this rank's tree; it may change once this returns.
            rows: of the metric log since the snapshot before; rank 0's count.
            facts: JSON values for the manifest; rank 0's count.
            probe: called with "snapshot_write" and "before_commit", for injected faults; not in this thread.
            committed: called with what is returned here and the snapshot, as soon as it is committed; not in this
                thread.

        Raises:
            UnsupportedState: the state of some rank cannot be written.
            Superseded: a newer generation advances the run.
            SnapshotError: some rank could not write an older snapshot; not for want of an answer, though.
        """
        self.check()
        if self._last is not None and self._last.position == position and not self._was_dropped(self._last):
            return self._last
        began = time.perf_counter()
        buffer, wait_s = self._buffers.acquire()
        try:
            staged: Staged | Exception = self._stager.stage(state, buffer)
        except Exception as error:
            staged = error  # the other ranks learn of it where they would have learnt that the files are there
        self._weights_queue.snapshot_taken()
        self._last = pending = PendingSnapshot(position, Future(), time.perf_counter() - began, wait_s)
        request = SnapshotRequest(position, staged, rows, facts, probe)
        self._queue.put(partial(self._write, _WriteJob(pending, request, buffer, committed)))
        if isinstance(staged, Exception):
            self.flush()
        return pending

    def save_weights(self, request: WeightsRequest) -> None:
        """Copy weights, which may change afterwards, and queue them for the store; only one rank calls this.

        No snapshot taken later is committed before they are written.
        """
        self._weights_queue.put(request)
        self._queue.put(self._flush_weights)

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
        """Wait until all that was taken is committed; raises why the last of it was not, or as `check` does."""
        self._in_turn(lambda: None)
        failure = self._last.future.exception() if self._last is not None else None
        self.check()
        if failure is not None:
            raise failure

    def flush_weights(self) -> None:
        """Wait until the weights given to `save_weights` are written; raises why they are not."""
        self._in_turn(self._weights_queue.flush)

    def _in_turn(self, act: Callable[[], object]) -> None:
        """Have the thread call `act` after everything that is queued already; raise what it raises."""
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

    def close(self, grace_s: float | None = None) -> bool:
        """Let the thread end once it has written what was taken; return whether it did. Never raises what it met.

        Args:
            grace_s: seconds it gets; then it is left behind, and what it has not committed never happened.
        """
        self._queue.put(None)
        self._thread.join(grace_s)
        if self._thread.is_alive():
            return False
        self._committer.close()
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
            self._newest = snapshot = self._committer.commit(request, before=self._weights_queue.flush)
            self._dropped.clear()
            job.pending.write_s = time.perf_counter() - began
            job.committed(job.pending, snapshot)
        except StoreSilent as error:
            failure = error
            self._drop(job.request, error)
        except Exception as error:
            failure = error
            self._failure = self._failure or error
        self._buffers.release(job.buffer)  # before it is announced: the next copy needs no other buffer
        if failure is not None or snapshot is None:
            job.pending.future.set_exception(failure)
            return
        job.pending.future.set_result(snapshot)
        if self._retention is not None:
            self._retention.add(snapshot, request.rows)

    def _flush_weights(self) -> None:
        try:
            self._weights_queue.flush()
        except Exception as error:
            log.warning(
                "weights were not written: %s: %s. They are kept, and written before the next snapshot is committed",
                type(error).__name__,
                error,
            )

    @staticmethod
    def _was_dropped(pending: PendingSnapshot) -> bool:
        return pending.future.done() and isinstance(pending.future.exception(), StoreSilent)

    def _drop(self, request: SnapshotRequest, error: StoreSilent) -> None:
        name = self._committer.name_of(request)
        before = self._dropped.get(name)  # of the one that was taken anew at its position
        self._dropped[name] = request.rows if before is None else join_segments([before, request.rows])
        self._weights_queue.snapshot_dropped()
        since = f"snapshot {self._newest.name}" if self._newest else "this attempt began"
        log.warning("%s. It is dropped and training goes on; a failure now costs what was done since %s", error, since)

    def _with_dropped(self, request: SnapshotRequest) -> SnapshotRequest:
        """Return `request` with the rows of the metric log that only dropped snapshots had."""
        if not self._dropped:
            return request
        rows = join_segments([*self._dropped.values(), request.rows])
        return replace(request, rows=rows, dropped=[*self._dropped])
