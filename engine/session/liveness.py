"""Last position of each rank, kept in the ranks' common store, read when a rank is lost."""

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from midstride.engine.world import World

__all__ = ["LastSeen"]

_EVERY_S = 1.0
#: a rank that has said nothing for so long is gone, or frozen
_SILENT_S = 3 * _EVERY_S
#: seconds for a read, as the store itself may be lost
_READ_S = 5.0


class LastSeen:
    """One rank's side.

    Args:
        store: torch's key-value store that all ranks share.
        world: this rank among the others.
        step: returns the optimizer steps that this rank has taken.
    """

    def __init__(self, store: Any, world: World, step: Callable[[], int]) -> None:
        self._store, self._world, self._step = store, world, step
        self._at, self._since, self._published_at = -1, 0.0, -math.inf
        self.publish(store)

    def publish(self, store: Any) -> None:
        """Say where this rank is, once a second, over a connection of the thread that calls this."""
        if (due := time.monotonic()) - self._published_at < _EVERY_S:
            return
        now = time.time()
        if (step := self._step()) != self._at:
            self._at, self._since = step, now
        self._published_at = due
        store.set(f"seen/{self._world.rank}", json.dumps({"step": step, "since": self._since, "time": now}))

    def others(self) -> str:
        """Return the last positions of the other ranks within some seconds, even without a store."""
        found: list[str] = []
        thread = threading.Thread(target=self._read, args=(found,), name="midstride-last-seen", daemon=True)
        thread.start()
        thread.join(_READ_S)
        ranks = [rank for rank in range(self._world.size) if rank != self._world.rank]
        unknown = [
            f"the state of rank {rank} is unknown, since the ranks' store does not answer"
            for rank in ranks[len(found) :]
        ]
        return "; ".join([*found, *unknown])

    def _read(self, found: list[str]) -> None:
        try:
            store = self._store.clone()
            for rank in range(self._world.size):
                if rank != self._world.rank:
                    said = store.get(f"seen/{rank}") if store.check([f"seen/{rank}"]) else None
                    found.append(_line(rank, None if said is None else json.loads(said), time.time()))
        except RuntimeError:  # the store's host is gone
            return


def _line(rank: int, said: dict[str, Any] | None, now: float) -> str:
    if said is None:
        return f"rank {rank} was never seen in training"
    silent_s, stood_s = (max(0.0, now - said[key]) for key in ("time", "since"))  # clocks may be set back
    if silent_s > _SILENT_S:
        return f"rank {rank} was last seen {silent_s:.0f} s ago, after step {said['step']}: it is gone, or frozen"
    return f"rank {rank} was seen {silent_s:.0f} s ago, after step {said['step']} for {stood_s:.0f} s"
