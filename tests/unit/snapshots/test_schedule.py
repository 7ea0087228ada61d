"""When a snapshot is due: at the rhythm that was asked for, at the same boundaries on every rank."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.limit import LIMIT_S

from midstride.engine.config.options import SnapshotOptions
from midstride.engine.snapshots.schedule import LONGEST_S, SnapshotSchedule


class Simulated:
    """A run in simulated time: steps of `step_s`, slower while a snapshot is written behind them."""

    def __init__(self, step_s: float, stall_s: float = 0.0, writing_s: float = 0.0, slower: float = 1.0) -> None:
        self.now = 0.0
        self.step_s, self.stall_s, self.writing_s, self.slower = step_s, stall_s, writing_s, slower
        self.written = 0.0

    def run(self, seconds: float, **options: Any) -> list[float]:
        """Train for so long; return when snapshots were taken."""
        schedule = SnapshotSchedule(
            SnapshotOptions(**options), lambda value: [value], lambda: self.now < self.written, self.clock
        )
        taken: list[float] = []
        number = 0
        while self.now < seconds:
            number += 1
            self.now += self.step_s * (self.slower if self.now < self.written else 1.0)
            if schedule.is_due(number):
                taken.append(self.now)
                self.now += self.stall_s
                self.written = self.now + self.writing_s
                schedule.reset(self.stall_s)
        return taken

    def clock(self) -> float:
        return self.now


def gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def test_every_n_steps_is_every_n_steps() -> None:
    schedule = SnapshotSchedule(SnapshotOptions(every_steps=5), lambda value: [value])
    assert [step for step in range(1, 21) if schedule.is_due(step)] == [5, 10, 15, 20]


@pytest.mark.parametrize("step_s", [0.01, 0.3, 7.0])
def test_every_t_seconds_is_about_every_t_seconds(step_s: float) -> None:
    found = gaps(Simulated(step_s, stall_s=0.05).run(3000, every_seconds=60))
    assert len(found) > 40
    assert all(abs(gap - 60) <= max(step_s, 0.1) + 0.05 for gap in found)


SLOWED = 4.0 - 4.0 / 1.5  # seconds of training lost beside 4 s of writing, at a pace slower by half
COSTS: dict[str, tuple[Callable[[], Simulated], float]] = {
    "only a stall": (lambda: Simulated(0.1, stall_s=0.2), 0.2),
    "slower beside the writing": (lambda: Simulated(0.1, stall_s=0.2, writing_s=4.0, slower=1.5), 0.2 + SLOWED),
}


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("name", COSTS)
def test_the_share_of_time_that_snapshots_cost_is_kept(name: str, share: float) -> None:
    make, cost_s = COSTS[name]
    found = gaps(make().run(6000, overhead=share))
    assert all(gap >= 0.9 * cost_s / share for gap in found[2:])
    assert all(gap <= 1.1 * (cost_s / share + cost_s) for gap in found[2:])


def test_no_snapshot_is_longer_ago_than_the_longest_interval() -> None:
    found = gaps(Simulated(1.0, stall_s=30.0).run(10_000))
    assert len(found) > 10
    assert all(gap <= LONGEST_S + 31 for gap in found)


def test_a_cheap_snapshot_is_not_taken_all_the_time() -> None:
    found = gaps(Simulated(0.001, stall_s=1e-5).run(60))
    assert all(0.99 <= gap <= 1.1 for gap in found[1:])


def test_all_ranks_agree_whatever_their_clocks_say() -> None:
    """Both go by the one whose snapshots cost more."""
    stalls, asked, barrier = [0.1, 0.4], [0, 0], threading.Barrier(2, timeout=LIMIT_S)

    def steps_of(rank: int) -> list[int]:
        def gather(value: object) -> list[Any]:
            asked[rank] = value  # type: ignore[call-overload]
            barrier.wait()
            values: list[Any] = list(asked)
            barrier.wait()
            return values

        simulated, steps = Simulated(0.1 + 0.001 * rank), []
        schedule = SnapshotSchedule(SnapshotOptions(overhead=0.01), gather, clock=simulated.clock)
        for step in range(1, 2000):
            simulated.now += simulated.step_s
            if schedule.is_due(step):
                steps.append(step)
                schedule.reset(stalls[rank])
        return steps

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(steps_of, range(2))
    assert first == second
    assert len(first) == 6
    assert all(380 <= gap <= 410 for gap in gaps(first[1:]))  # of 0.1 s each
