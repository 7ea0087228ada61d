"""Detects a hang of a round, and gives its ranks time to write their stacks."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from midstride.engine.launch.watchdog import Hang, RunningClock, Watchdog
from midstride.engine.session.session import Session

if TYPE_CHECKING:
    from midstride.engine.config.world import WorldOptions

__all__ = ["RoundWatchdog"]

#: between looks at the heartbeats, which lie in files
_LOOK_S = 0.5
#: for the nodes to hand on the stacks of ranks that hang
_STACKS_S = 10.0


class RoundWatchdog:
    """The watchdog of a round, which looks seldom and remembers what it has found.

    Args:
        session: with the heartbeats of the round.
        options: how long the ranks may take.
        clock: seconds, for tests; a `RunningClock` by default.
    """

    def __init__(self, session: Session, options: "WorldOptions", clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or RunningClock()
        self._watchdog = Watchdog(session, options, clock=self._clock)
        self._look_at, self._stacks_by = -math.inf, math.inf
        #: why the round does not get on; None while it does, as far as was seen
        self.hang: Hang | None = None

    def look(self) -> Hang | None:
        """Return the hang, once, when it is found."""
        now = self._clock()
        if self.hang is not None or now < self._look_at:
            return None
        self._look_at = now + _LOOK_S
        self.hang = self._watchdog.hang()
        if self.hang is not None:
            self._stacks_by = now + _STACKS_S
        return self.hang

    def stacks_are_late(self) -> bool:
        """Whether the ranks of a round that hangs have had their time to write their stacks."""
        return self._clock() > self._stacks_by

    def step(self) -> int:
        """Return how many optimizer steps were taken."""
        return self._watchdog.step()
