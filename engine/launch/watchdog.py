"""Finds, by the heartbeats of a world, ranks that hang and ranks for which the others wait."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from midstride.engine.processes.lifetime import is_suspended
from midstride.engine.session.heartbeat import HeartbeatReading, Phase
from midstride.engine.session.session import Session

if TYPE_CHECKING:
    from midstride.engine.config.world import WorldOptions

__all__ = ["DUMP_STACKS", "Hang", "RunningClock", "Straggler", "Watchdog", "write_stacks"]

#: the signal at which a rank writes the Python stack of its every thread to its file in the session
DUMP_STACKS = signal.SIGUSR2

WINDOW_S = 30.0  # over which ranks are compared
_BATCHES = 20  # that every rank must have done in it
_SLOW_FACTOR = 1.5  # a straggler takes so many times as long as the others,
_SLOW_SHARE = 0.1  # and they wait for it for this share of the time
_LOOK_S = 0.1  # between two looks at the files to which ranks write their stacks
_LOOKS = 4  # so many looks without growth: they have written them
_NO_STACKS_S = 4.0  # the longest wait for them
_LONGEST_GAP_S = 2.0  # between two looks of a process that runs

_DOING = {
    Phase.STARTING: ("came to a first step", "startup_timeout_s"),
    Phase.TRAINING: ("did a batch", "hang_timeout_s"),
    Phase.EVALUATING: ("did a batch of validation", "validation_timeout_s"),
    Phase.ENDED: ("ended", "hang_timeout_s"),
}


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait.

    Args:
        rank: its number.
        own_s: seconds that it takes to read a batch and to run its training step.
        others_s: the median of the same over the other ranks.
    """

    rank: int
    own_s: float
    others_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it needs {self.own_s * 1e3:.3g} ms to read a batch and for its training step, "
            f"the others {self.others_s * 1e3:.3g} ms, and they wait for it"
        )


@dataclass(frozen=True)
class Hang:
    """A world that makes no progress.

    Args:
        words: a message on the missing event and its time limit.
        ranks: the ranks that the others wait for, as far as heartbeats tell.
        why: text on these ranks; "" if there are none.
    """

    words: str
    ranks: tuple[int, ...] = ()
    why: str = ""

    def message(self, name: Callable[[int], str] = "rank {}".format) -> str:
        """Return the message for people.

        Args:
            name: returns the name of a rank.
        """
        who = f" The others wait for {' and '.join(map(name, self.ranks))}: {self.why}." if self.ranks else ""
        return f"{self.words}: the world hung and was ended.{who} The stack of every rank is in the log."


class RunningClock:
    """A clock of the seconds in which this process ran, called twice a second or more.

    Ranks of a suspended machine, container or Slurm job do not count as hanging.
    """

    def __init__(self) -> None:
        self._seconds, self._before = 0.0, time.monotonic()

    def __call__(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._before, _LONGEST_GAP_S)
        self._before = now
        return self._seconds


class Watchdog:
    """Reads the heartbeats of one world.

    Args:
        session: of the world.
        options: how many ranks there are, and how long they may take.
        patience_s: seconds to wait beyond the limits: the process that watches the nodes ends a hang first.
        clock: seconds, for tests; a `RunningClock` by default.
    """

    def __init__(
        self,
        session: Session,
        options: "WorldOptions",
        patience_s: float = 0.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._session, self._options, self._patience_s = session, options, patience_s
        self._clock = clock = clock or RunningClock()
        self._seen: list[tuple[int, Phase]] = []
        self._since = self._window = clock()
        self._before: list[HeartbeatReading] = []
        self._named: set[int] = set()

    def heartbeats(self) -> list[HeartbeatReading]:
        """Return the heartbeat of every rank."""
        return [HeartbeatReading.read(self._session.heartbeat(rank)) for rank in range(self._ranks)]

    @property
    def _ranks(self) -> int:
        return self._session.ranks or self._options.processes

    def hang(self) -> Hang | None:
        """Return the hang once its limit is over; None while ranks progress or wait for a store."""
        readings, now = self.heartbeats(), self._clock()
        if self._options.hosts and not any(reading.pid for reading in readings):
            return None  # all ranks are on other machines: their heartbeats are not seen here
        seen = [(reading.beats, reading.phase) for reading in readings]
        if seen != self._seen or any(reading.phase is Phase.WAITING for reading in readings):
            self._seen, self._since = seen, now
            return None
        phases = {reading.phase for reading in readings}
        # The most patient limit counts: others wait for the rank that may take longest.
        limit_s, phase = max((self._limit_s(phase), phase) for phase in phases)
        if now - self._since <= limit_s + self._patience_s:
            return None
        what, option = _DOING[phase]
        words = f"no rank {what} for {limit_s:g} s (world.{option}), after step {self.step()}"
        return Hang(words, *_waited_for(readings))

    def _limit_s(self, phase: Phase) -> float:
        limit: float | None = getattr(self._options, _DOING[phase][1])
        return float("inf") if limit is None else limit

    def straggler(self) -> Straggler | None:
        """Return a rank that is much slower than the others; each rank is returned once."""
        if self._ranks == 1 or self._clock() - self._window < WINDOW_S:
            return None
        readings, before, self._window = self.heartbeats(), self._before, self._clock()
        self._before = readings
        if len(before) != len(readings):  # none yet, or nodes have come or gone
            return None
        batches = [now.batches - then.batches for now, then in zip(readings, before, strict=True)]
        if min(batches) < _BATCHES:
            return None
        own = [(now.worked_s - then.worked_s) / n for now, then, n in zip(readings, before, batches, strict=True)]
        rank = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(own[:rank] + own[rank + 1 :])
        waits = (own[rank] - others) * batches[rank] > _SLOW_SHARE * WINDOW_S
        if rank in self._named or own[rank] < _SLOW_FACTOR * others or not waits:
            return None
        self._named.add(rank)
        return Straggler(rank, own[rank], others)

    def all_ended(self) -> bool:
        """Whether every rank has written its outcome."""
        return all(reading.phase is Phase.ENDED for reading in self.heartbeats())

    def step(self) -> int:
        """Return how many optimizer steps were taken."""
        return max(reading.step for reading in self.heartbeats())

    def write_stacks(self) -> None:
        """Make every rank write the Python stacks of its threads to the world's log."""
        write_stacks(dict(enumerate(self.heartbeats())), self._session, self._session.log)


def _waited_for(readings: list[HeartbeatReading]) -> tuple[tuple[int, ...], str]:
    """Return the ranks for which the others wait, if known, and facts about them."""
    least = min(reading.beats for reading in readings)
    signs = {
        "suspended, by SIGSTOP or a debugger": [
            reading.is_suspended or is_suspended(reading.pid) for reading in readings
        ],
        "still reading a batch, or in the training step": [reading.works for reading in readings],
        "a batch behind": [reading.beats == least for reading in readings],
    }
    for why, shown in signs.items():
        if any(shown) and not all(shown):
            return tuple(rank for rank, is_shown in enumerate(shown) if is_shown), why
    return (), ""


def write_stacks(ranks: Mapping[int, HeartbeatReading], session: Session, log: Path) -> None:
    """Append the Python stacks of this machine's ranks, which write them side by side, to `log`."""
    suspended = {rank for rank, reading in ranks.items() if is_suspended(reading.pid)}
    before = {rank: _size(session.stacks(rank)) for rank in ranks}
    asked = [rank for rank, reading in ranks.items() if _ask_for_stacks(reading.pid) and rank not in suspended]
    _wait_for_stacks({session.stacks(rank): before[rank] for rank in asked})
    with log.open("ab") as file:
        for rank, reading in ranks.items():
            doing = "suspended: it writes nothing" if rank in suspended else reading.phase.name.lower()
            file.write(f"\n--- rank {rank}, process {reading.pid}, {doing}\n".encode())
            with suppress(FileNotFoundError):  # it has not come so far as to open it
                file.write(session.stacks(rank).read_bytes()[before[rank] :])


def _ask_for_stacks(pid: int) -> bool:
    """Return whether there is a process `pid` to ask."""
    try:
        if pid:
            os.kill(pid, DUMP_STACKS)
    except ProcessLookupError:
        return False
    return bool(pid)


def _wait_for_stacks(before: Mapping[Path, int]) -> None:
    """Wait until each file has grown from so many bytes, and none grows any more.

    That takes seconds on a busy machine. Silent ranks share the longest wait.
    """
    until, sizes, looks = time.monotonic() + _NO_STACKS_S, dict(before), 0
    while before and looks < _LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_S)
        found = {path: _size(path) for path in before}
        looks = looks + 1 if found == sizes and all(found[path] > before[path] for path in before) else 0
        sizes = found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0  # the rank has not opened it yet
