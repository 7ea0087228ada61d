"""The queue of weights: best and last weights on their way to the store, behind training.

Of the weights that are queued between two snapshots only the newest of each folder count. Weights that cannot be
written stay in the queue and are written before the next snapshot is committed: no snapshot names missing weights.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.lease import Lease
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.staging import Stager
from midstride.engine.snapshots.weights import StagedWeights, WeightsFolder, WeightsRequest
from midstride.engine.snapshots.weights_index import FOLDERS
from midstride.engine.storage.store import Store
from midstride.engine.world import World

__all__ = ["WeightsQueue"]


@dataclass(eq=False)
class _Entry:
    """Weights that wait, and after how many snapshots they came."""

    folder: str
    weights: StagedWeights
    buffer: Buffer
    snapshots: int


class WeightsQueue:
    """What one generation has to write to `best` and `last`. One thread puts, another one flushes.

    Args:
        store: of the run.
        lease: of this generation.
    """

    def __init__(self, store: Store, lease: Lease) -> None:
        self._folders = {folder: WeightsFolder(store, lease, folder) for folder in FOLDERS}
        self._written: dict[str, tuple[int, str]] = {}  # folder -> the newest: after how many snapshots, its name
        self._stager = Stager(World(), lambda path: False)
        self._waiting: list[_Entry] = []  # oldest first
        self._free: list[Buffer] = []
        self._snapshots = 0
        self._lock = threading.Lock()

    def put(self, request: WeightsRequest) -> None:
        """Copy the weights of `request`; when this returns, they may change.

        Raises:
            UnsupportedState: they hold values that cannot be written.
        """
        with self._lock:
            buffer = self._free.pop() if self._free else Buffer()
        staged = self._stager.stage(request.state_dict, buffer)
        weights = StagedWeights(staged, request.metrics, request.facts, request.position)
        with self._lock:
            self._waiting.append(_Entry(request.folder, weights, buffer, self._snapshots))
            self._drop_oldest()

    def snapshot_taken(self) -> None:
        """Take note of a snapshot: what waits by now belongs to it, and gives way to nothing."""
        self._snapshots += 1

    def snapshot_dropped(self) -> None:
        """Take note that the oldest snapshot which has not been committed never will be."""
        with self._lock:
            if self._waiting:
                first = self._waiting[0].snapshots
                for entry in self._waiting:
                    entry.snapshots += entry.snapshots == first < self._snapshots
                self._drop_oldest()

    def flush(self) -> None:
        """Write what waits; raises why it cannot be written, and then it waits on."""
        while (entry := self._first()) is not None:
            try:
                self._write(entry)
            except BaseException:
                with self._lock:
                    self._waiting.insert(0, entry)
                    self._drop_oldest()
                raise
            with self._lock:
                self._free.append(entry.buffer)

    def sweep(self, positions: Iterable[Position]) -> None:
        """Remove weights that no run which resumes from one of `positions` has use for."""
        for folder in self._folders.values():
            folder.sweep(positions)

    def _write(self, entry: _Entry) -> None:
        folder, (snapshots, before) = self._folders[entry.folder], self._written.get(entry.folder, (-1, ""))
        name = folder.write(entry.weights)
        self._written[entry.folder] = entry.snapshots, name
        if snapshots == entry.snapshots and before != name:  # no snapshot stands between them
            folder.drop(before)

    def _first(self) -> _Entry | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def _drop_oldest(self) -> None:
        """Forget weights to which others of their folder are newer, without a snapshot between them."""
        newest = {(entry.folder, entry.snapshots): entry for entry in self._waiting}
        self._free += [entry.buffer for entry in self._waiting if entry not in newest.values()]
        self._waiting = [entry for entry in self._waiting if entry in newest.values()]
