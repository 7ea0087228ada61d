"""Schedule of snapshots, equal on every rank, at no cost per step.

A rhythm in steps is the same everywhere. A rhythm in seconds, or a share of the
time, is turned into a number of steps by all ranks together, every now and then: no step pays for it.

What a snapshot costs is measured: the time training is held up, and by how much the steps
beside the writing are slower than the others.
"""

import time
from collections.abc import Callable
from typing import Any

from midstride.engine.config.options import SnapshotOptions

__all__ = ["SnapshotSchedule"]

#: a run that asks for nothing else loses at most this much
LONGEST_S = 600.0
#: boundaries after which a rhythm in time is first agreed on; then each time after twice as many
FIRST_LOOK = 4
DEFAULT_OVERHEAD = 0.01
#: what a snapshot counts at least; also what the first one is taken to cost
LEAST_COST_S = 0.01


class SnapshotSchedule:
    """Counts boundaries (steps, validation batches) and tells at which a snapshot is due.

    Args:
        options: the rhythm that was chosen.
        gather: returns every rank's copy of a value, in the order of ranks.
        is_writing: whether a snapshot is being written behind training.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        options: SnapshotOptions,
        gather: Callable[[object], list[Any]],
        is_writing: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._gather, self._is_writing, self._clock = options, gather, is_writing, clock
        self._began, self._count = clock(), 0
        self._due, self._known = FIRST_LOOK, False
        self._stall_s = 0.0
        self._beside: tuple[float, int] | None = (0.0, 0)  # seconds and boundaries beside the writing; None: not over

    def is_due(self, number: int) -> bool:
        """Return whether a snapshot is due at the end of step (or validation batch) `number`."""
        if self._options.every_steps is not None:
            return number % self._options.every_steps == 0
        self._count += 1
        if self._beside is None and not self._is_writing():
            self._beside = self._clock() - self._began, self._count
        if self._count < self._due:
            return False
        if not self._known:
            self._agree()
        return self._known and self._count >= self._due

    def falls_due_within(self, boundaries: int, seconds: float) -> bool:
        """Return whether a snapshot is due in the next `boundaries`, which take `seconds`.

        Every rank calls this.
        """
        if self._options.every_steps is not None:
            return boundaries >= self._options.every_steps
        elapsed_s = self._clock() - self._began
        return any(self._gather(elapsed_s + seconds >= self._wanted_s(elapsed_s)))

    def reset(self, stall_s: float) -> None:
        """Start counting again after a snapshot that held training up for `stall_s` seconds."""
        self._began, self._count, self._stall_s, self._beside = self._clock(), 0, stall_s, None
        self._due, self._known = max(FIRST_LOOK, self._due // 2), False

    def _agree(self) -> None:
        """Turn the time wanted between snapshots into boundaries: those of the rank that wants most."""
        elapsed_s = max(self._clock() - self._began, 1e-6)
        wanted = max(1, round(self._wanted_s(elapsed_s) * self._count / elapsed_s))
        wanted = max(self._gather(wanted))
        # The pace of the first steps says little: look again before believing it.
        self._known = wanted <= 2 * self._count
        self._due = wanted if self._known else 2 * self._count

    def _wanted_s(self, elapsed_s: float) -> float:
        if self._options.every_seconds is not None:
            return self._options.every_seconds
        share = self._options.overhead or DEFAULT_OVERHEAD
        cost_s = max(self._stall_s + self._slowed_s(elapsed_s), LEAST_COST_S)
        return min(LONGEST_S, cost_s / share)

    def _slowed_s(self, elapsed_s: float) -> float:
        """Seconds that the steps beside the writing took longer than as many others."""
        if self._beside is None:
            return elapsed_s  # it is still being written: its time is unknown yet, so wait
        beside_s, beside = self._beside
        others = self._count - beside
        pace_s = (elapsed_s - beside_s) / others if others else 0.0
        return min(max(0.0, beside_s - beside * pace_s), beside_s)
