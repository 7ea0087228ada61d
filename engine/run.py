"""A run as one fit sees it: its folder, where it resumes, its snapshots, its weights, its metric log."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from midstride.engine.errors import EngineError, SnapshotError, SnapshotMissing
from midstride.engine.metric_log import join_segments
from midstride.engine.snapshots.history import History, Snapshot
from midstride.engine.snapshots.lease import Lease, acquire
from midstride.engine.snapshots.place import Place
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.store import Store
from midstride.engine.snapshots.weights import save_weights
from midstride.engine.snapshots.writer import Writer
from midstride.engine.strategies.base import Strategy

__all__ = ["Resume", "Run"]

Resume = Literal["auto", "never"] | int
T = TypeVar("T")
log = logging.getLogger(__name__)


class Run:
    """One run's folder, in the hands of one rank of one generation.

    Args:
        url: folder or fsspec URL of the run.
        strategy: through which the ranks agree.
        keep: snapshots to keep.
    """

    def __init__(self, url: str, strategy: Strategy, keep: int) -> None:
        self.name = url.rstrip("/").rpartition("/")[2]
        self.store = Store.open(url)
        self._strategy, self._keep = strategy, keep
        self._history = History(self.store)
        self._writer: Writer | None = None
        self.lease: Lease | None = None
        self._first(self.store.ensure_writable)

    def resume(self, resume: Resume) -> tuple[Snapshot, Any] | None:
        """Return the snapshot to go on from and this rank's tree in it; None for a fresh start.

        It is the newest one that every rank could verify; what one of them could not is set aside.

        Raises:
            SnapshotMissing: `resume` is a step of which there is no good snapshot.
        """
        while (snapshot := self._first(lambda: self._choose(resume))) is not None:
            tree, fault = self._read(snapshot)
            faults = [text for text in self._strategy.gather(fault) if text]
            if not faults:
                return snapshot, tree
            self._first(lambda: self._history.set_aside(snapshot, faults[0]))  # noqa: B023 - called at once
        return None

    def _choose(self, resume: Resume) -> Snapshot | None:
        if resume == "never":
            return None
        if resume == "auto":
            return self._history.newest_good()
        found = [snapshot for snapshot in self._history.snapshots() if snapshot.place.step == resume]
        if not found:
            steps = ", ".join(str(s.place.step) for s in self._history.snapshots()) or "none"
            raise SnapshotMissing(f"no snapshot of step {resume} in {self.store.url}; there are those of: {steps}")
        self._history.verify(found[-1])
        return found[-1]

    def _read(self, snapshot: Snapshot) -> tuple[Any, str]:
        rank = self._strategy.world.rank
        try:
            return read(self.store, snapshot, min(rank, snapshot.manifest["world_size"] - 1)), ""
        except SnapshotError as error:
            return None, str(error)

    def begin(self, resumed_from: Snapshot | None) -> Lease:
        """Take the next generation: from now on older worlds of this run are superseded."""
        facts = {"host": os.uname().nodename, "pid": os.getpid()}
        name = resumed_from.name if resumed_from else None
        self.lease = lease = self._first(lambda: acquire(self.store, name, facts))
        self._writer = Writer(self.store, lease, self._strategy.world, self._strategy.gather, self.name, self._keep)
        return lease

    def snapshot(
        self, place: Place, state: object, rows: str, facts: dict[str, Any], probe: Callable[[str], object]
    ) -> tuple[Snapshot, float]:
        """Commit a snapshot; return it and the seconds training was held up."""
        if self._writer is None:
            raise RuntimeError("begin() comes before snapshot()")
        began = time.monotonic()
        taken = self._writer.take(place, state, self._strategy.is_replicated, rows, facts, probe)
        return taken, time.monotonic() - began

    def save_weights(self, folder: Literal["best", "last"], state_dict: dict[str, Any], facts: dict[str, Any]) -> None:
        """Replace the weights in `folder`; rank 0 writes."""
        metrics = facts.pop("metrics")
        self._first(lambda: save_weights(self.store, folder, state_dict, metrics, facts))

    def write(self, path: str, text: str) -> None:
        """Replace a small text file of the run; rank 0 writes."""
        self._first(lambda: self.store.write(path, text.encode()))

    def assemble_metric_log(self) -> None:
        """Write `metrics.csv` from the committed segments."""
        self._first(lambda: self.store.write("metrics.csv", join_segments(self._history.rows()).encode()))

    def close(self) -> None:
        """Wait until everything taken is committed."""
        if self._writer is not None:
            self._writer.close()

    def _first(self, act: Callable[[], T]) -> T:
        """Return what rank 0's `act` returns, on every rank; what it raises is raised on every rank."""
        result: tuple[Any, EngineError | None] = None, None
        if self._strategy.world.is_first:
            try:
                result = act(), None
            except EngineError as error:
                result = None, error
            except Exception as error:
                result = None, SnapshotError(f"{self.store.url}: {type(error).__name__}: {error}")
                log.exception("in %s", self.store.url)
        value, failure = self._strategy.gather(result)[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]
