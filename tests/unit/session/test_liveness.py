"""Where a rank was last seen is told right, also where the clock of the machine is set anew meanwhile."""

import pytest
import torch.distributed

from midstride.engine.session import liveness
from midstride.engine.session.liveness import LastSeen
from midstride.engine.world import World


class Clock:
    """The two clocks of a machine; only that of the calendar is ever set."""

    def __init__(self) -> None:
        self.now, self.ticks = 1e9, 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.ticks

    def go_on(self, seconds: float, set_by: float = 0.0) -> None:
        self.ticks += seconds
        self.now += seconds + set_by


@pytest.mark.parametrize("set_by", [0.0, 3600.0, -3600.0])
def test_a_rank_is_seen_also_once_the_clock_was_set(set_by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store, steps = Clock(), torch.distributed.HashStore(), iter([7, 8])
    monkeypatch.setattr(liveness, "time", clock)
    seen, reader = LastSeen(store, World(1, 2), lambda: next(steps)), LastSeen(store, World(0, 2), lambda: 7)
    assert reader.others() == "rank 1 was seen 0 s ago, after step 7 for 0 s"
    clock.go_on(1.5, set_by)
    seen.publish(store)
    assert reader.others() == "rank 1 was seen 0 s ago, after step 8 for 0 s"


def test_nothing_was_seen_after_now(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(), torch.distributed.HashStore()
    monkeypatch.setattr(liveness, "time", clock)
    _, reader = LastSeen(store, World(1, 2), lambda: 7), LastSeen(store, World(0, 2), lambda: 7)
    clock.go_on(0.5, set_by=-60.0)
    assert reader.others() == "rank 1 was seen 0 s ago, after step 7 for 0 s"
