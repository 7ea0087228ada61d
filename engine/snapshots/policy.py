"""When a snapshot is due. The answer is the same on every rank, and asking costs nothing.

A rhythm in steps is the same everywhere by itself. A rhythm in seconds, or a share of the
time, is turned into a number of steps by rank 0 whenever the ranks exchange something
anyway, and handed to all of them: no step pays for it.
"""

import time
from collections.abc import Callable
from typing import Any

from midstride.engine.options import SnapshotOptions

__all__ = ["Policy"]

#: a run that asks for nothing else loses at most this much
LONGEST_S = 600.0
#: boundaries after which a rhythm in time is first agreed on; then each time after twice as many
FIRST_LOOK = 4
DEFAULT_OVERHEAD = 0.01


class Policy:
    """Counts boundaries (steps, and batches of validation) and says at which of them a snapshot is due.

    Args:
        options: the rhythm that was chosen.
        gather: returns every rank's copy of a value, in the order of ranks.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        options: SnapshotOptions,
        gather: Callable[[object], list[Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._gather, self._clock = options, gather, clock
        self._began, self._count = clock(), 0
        self._due, self._known = FIRST_LOOK, False
        self._cost_s = 0.0

    def is_due(self, number: int) -> bool:
        """Return whether a snapshot is due at the boundary that ends step (or validation batch) `number`."""
        if self._options.every_steps is not None:
            return number % self._options.every_steps == 0
        self._count += 1
        if self._count < self._due:
            return False
        if not self._known:
            self._agree()
        return self._known and self._count >= self._due

    def taken(self, cost_s: float) -> None:
        """Start counting again after a snapshot that held training up for `cost_s` seconds."""
        self._began, self._count, self._cost_s = self._clock(), 0, cost_s
        self._due, self._known = max(FIRST_LOOK, self._due // 2), False

    def _agree(self) -> None:
        """Turn the time wanted between snapshots into boundaries, as rank 0 sees it."""
        elapsed_s = max(self._clock() - self._began, 1e-6)
        wanted = max(1, round(self._wanted_s() * self._count / elapsed_s))
        wanted = self._gather(wanted)[0]
        # The pace of the first steps says little: look again before believing it.
        self._known = wanted <= 2 * self._count
        self._due = wanted if self._known else 2 * self._count

    def _wanted_s(self) -> float:
        if self._options.every_seconds is not None:
            return self._options.every_seconds
        share = self._options.overhead or DEFAULT_OVERHEAD
        # The first costs are unknown: a hundredth of a second stands for them.
        return min(LONGEST_S, max(self._cost_s, 0.01) / share)
