"""The outbox: best and last weights on their way to the store, behind training.

Of each folder only the newest weights count, so those that wait give way to newer ones. What cannot be written waits
on, and every snapshot has it written first: none that is committed speaks of best weights that are nowhere.
"""

import threading
from functools import partial
from typing import Any

from midstride.engine.snapshots.arena import Arena, Buffer
from midstride.engine.snapshots.lease import Lease, ensure_newest
from midstride.engine.snapshots.staging import Stager
from midstride.engine.snapshots.store import Store
from midstride.engine.snapshots.weights import StagedWeights, write_weights
from midstride.engine.world import World

__all__ = ["Outbox"]


class Outbox:
    """What one generation has to write to `best` and `last`. One thread puts, another one sends.

    Args:
        store: of the run.
        lease: of this generation.
    """

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store, self._lease = store, lease
        self._arena = Arena(store.terms.waiting)
        self._stager = Stager(World(), lambda path: False)
        self._waiting: dict[str, tuple[StagedWeights, Buffer]] = {}
        self._lock = threading.Lock()

    def put(self, folder: str, state_dict: dict[str, Any], metrics: dict[str, float], facts: dict[str, Any]) -> None:
        """Copy weights; when this returns, they may change. Arguments as those of `save_weights`.

        Raises:
            UnsupportedState: they hold values that cannot be written.
        """
        older = self._taken(folder)
        buffer = older[1] if older else self._arena.acquire()[0]
        try:
            staged = self._stager.stage(state_dict, buffer)
        except BaseException:
            self._arena.release(buffer)
            raise
        with self._lock:
            returned = self._waiting.pop(folder, None)
            self._waiting[folder] = StagedWeights(staged, metrics, facts), buffer
        if returned:  # it came back meanwhile
            self._arena.release(returned[1])

    def send(self) -> None:
        """Write what waits; raises why it cannot be written, and then it waits on."""
        for folder in list(self._waiting):
            if waiting := self._taken(folder):
                weights, buffer = waiting
                try:
                    write_weights(self._store, folder, weights, check=partial(ensure_newest, self._store, self._lease))
                except BaseException:
                    self._return(folder, weights, buffer)
                    raise
                self._arena.release(buffer)

    def _taken(self, folder: str) -> tuple[StagedWeights, Buffer] | None:
        with self._lock:
            return self._waiting.pop(folder, None)

    def _return(self, folder: str, weights: StagedWeights, buffer: Buffer) -> None:
        with self._lock:
            newer = folder in self._waiting
            if not newer:
                self._waiting[folder] = weights, buffer
        if newer:
            self._arena.release(buffer)
