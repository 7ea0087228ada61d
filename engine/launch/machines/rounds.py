"""Rounds of nodes that train together, until a node or its ranks end, or more can train.

Nothing here communicates: the server reports events of nodes, and asks for the next action.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from midstride.engine.launch.watchdog import Hang, RunningClock, Watchdog
from midstride.engine.session.attempts import Attempt, Verdict, retry_verdict
from midstride.engine.session.events import Event, EventLog
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.session import Session

if TYPE_CHECKING:
    from midstride.engine.config.world import WorldOptions

__all__ = ["Node", "RoundLog", "RoundWatchdog", "Rounds"]

#: seconds to wait for another node, after the last one has joined, before the first round begins
_GATHER_S = 5.0
#: a node that has ended `_MAX_FAILURES` of the last `_ROUNDS_COUNTED` rounds waits while there are enough others
_MAX_FAILURES, _ROUNDS_COUNTED = 2, 10


@dataclass
class Node:
    """A machine that has joined, as it was when it last reported.

    Args:
        number: from 1, in the order in which nodes join.
        host: its host name.
        cores: its number of cores.
        seen_at: when its last message came, by the clock of `Rounds`.
        is_ready: whether it waits for a round; if it is a member of the current one, its ranks have ended.
        is_done: whether its ranks have trained to the end of the run.
        left: why it has left; "" while it has not.
        stacks: how often its ranks have written their stacks to the log.
    """

    number: int
    host: str
    cores: int
    seen_at: float
    is_ready: bool = False
    is_done: bool = False
    left: str = ""
    stacks: int = 0

    def begin(self) -> None:
        """Reset its reports about the previous round: a round with it begins."""
        self.is_ready = self.is_done = False


class Rounds:
    """The nodes that have joined, and which of them train in the round.

    Args:
        options: how many nodes there may be, and time-outs.
        clock: seconds, for tests; a `RunningClock` by default.
    """

    def __init__(self, options: "WorldOptions", clock: Callable[[], float] | None = None) -> None:
        self._options, self._clock = options, clock or RunningClock()
        self.machines = options.machines
        self._arrived = self._clock()
        self._training_since: float | None = None
        self._before: list[Node] = []
        self._failures: list[tuple[int, str]] = []  # the round and the host that ended it
        self.nodes: dict[int, Node] = {}
        self.number = 0
        self.members: list[Node] = []

    def add(self, number: int, host: str, cores: int) -> None:
        """Add a node that has joined."""
        self._arrived = self._clock()
        self.nodes[number] = Node(number, host, cores, self._arrived)

    def update(
        self, node: Node, *, waits: bool = False, is_done: bool = False, left: str = "", stacks: int = 0
    ) -> None:
        """Update `node` by its report: it waits for a round, leaves, or has written stacks."""
        node.seen_at, node.left, node.stacks = self._clock(), node.left or left, stacks
        node.is_ready, node.is_done = node.is_ready or waits, node.is_done or is_done

    def ranks(self, node: Node) -> range:
        """Return the ranks of a node that trains."""
        first = self.members.index(node) * self.machines.processes
        return range(first, first + self.machines.processes)

    def member_of(self, rank: int) -> Node:
        """Return the node that has a rank."""
        return self.members[rank // self.machines.processes]

    def silence_s(self, node: Node) -> float:
        """Return the seconds since the last message of `node`."""
        return self._clock() - node.seen_at

    def is_silent(self, node: Node) -> bool:
        """Whether the last message of `node` is older than the time-out."""
        return self.silence_s(node) > self._options.node_timeout_s

    def silence_message(self, node: Node) -> str:
        """Return a message that `node` is silent."""
        return f"{self.describe(node)} was silent for {self._options.node_timeout_s:g} s"

    def count_failure(self, node: Node) -> None:
        """Count that `node` has ended this round, because it or its ranks died."""
        self._failures.append((self.number, node.host))

    def fails_too_often(self, node: Node) -> bool:
        """Return whether `node` has ended too many recent rounds; it waits while others suffice."""
        return self._failures_of(node) >= _MAX_FAILURES

    def failure_message(self, node: Node) -> str:
        """Return a message that a node waits because it has ended too many rounds."""
        times = self._failures_of(node)
        return (
            f"node {node.host} has ended {times} of the last {_ROUNDS_COUNTED} rounds: it waits while others are enough"
        )

    def _failures_of(self, node: Node) -> int:
        return sum(host == node.host and number > self.number - _ROUNDS_COUNTED for number, host in self._failures)

    def present(self) -> list[Node]:
        """Return the nodes that are there."""
        return [node for node in self.nodes.values() if not node.left and not self.is_silent(node)]

    def end(self) -> tuple[str, str] | None:
        """Return how the round must end ("stop" or "kill") and why; None if it continues.

        The reason is "" if the round's ranks report it.
        """
        for node in self.members:
            if node.left:
                return "stop", f"{self.describe(node)} leaves: {node.left}"
            if self.is_silent(node):
                return "kill", f"{self.silence_message(node)}: it is left out"
        # The ranks of those that are done may be ahead of the others, which come to the end as well.
        if any(node.is_ready and not node.is_done for node in self.members) or self.have_left():
            return "stop", ""
        if self._has_trained():
            waiting = [node for node in self._waiting() if not self.fails_too_often(node)]
            if self.machines.training(len(self.members) + len(waiting)) > len(self.members):
                return "stop", f"{_list([node.host for node in waiting])} can train as well"
        return None

    def note_first_step(self) -> None:
        """Note when the round has taken its first step: `grow_after_s` counts from then on."""
        if self._training_since is None:
            self._training_since = self._clock()

    def _has_trained(self) -> bool:
        """Whether the round has trained for so long that it may be ended for a larger one."""
        grow_s, since = self._options.grow_after_s, self._training_since
        return grow_s is not None and since is not None and self._clock() - since >= grow_s

    def describe(self, node: Node) -> str:
        """Return the name of a node that trains, with its ranks, for messages."""
        ranks = self.ranks(node)
        said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"node {node.host} ({said})"

    def have_left(self) -> bool:
        """Whether the ranks of every node of the round have ended, or can no longer be reached."""
        return all(node.is_ready or node.left or self.is_silent(node) for node in self.members)

    def have_written_stacks(self, times: int) -> bool:
        """Whether the ranks of every node of the round have written their stacks so often."""
        return all(node.stacks >= times for node in self.members)

    def close(self) -> None:
        """End the round: no node trains."""
        self._before, self.members = self.members, []

    def begin(self) -> bool:
        """Begin the next round if there are nodes enough; return whether it has begun."""
        waiting = sorted(self._waiting(), key=self._order)
        good = [node for node in waiting if not self.fails_too_often(node)]
        ready = good if self.machines.training(len(good)) else waiting
        count = self.machines.training(len(ready))
        gathers = self.number == 0 and self._clock() - self._arrived < _GATHER_S and len(ready) < self.machines.most
        if count == 0 or gathers:
            return False
        self.number, self.members, self._training_since = self.number + 1, ready[:count], None
        for node in self.members:
            node.begin()
        return True

    def _waiting(self) -> list[Node]:
        """Return the nodes that could train, and do not."""
        return [node for node in self.present() if node.is_ready and node not in self.members]

    def _order(self, node: Node) -> tuple[int, int]:
        """Return a sort key of nodes: those that trained keep their order, ranks and data."""
        return (self._before.index(node) if node in self._before else len(self._before), node.number)


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


#: rounds in a row without a newer snapshot that are followed by another
_RETRIES = 3


class RoundLog:
    """Keeps every round as an attempt, and writes the events of all of them to one file.

    Args:
        events: the file.
    """

    def __init__(self, events: Path) -> None:
        self._events = EventLog(events)
        self._ended: list[Attempt] = []
        self._round = Attempt(0)

    def begin(self, number: int, hosts: Sequence[str], ranks: int, why: str) -> None:
        """Begin a round of nodes and their ranks; `why` it follows another, "" if it does not."""
        self._round = Attempt(number, started=time.time())
        self.write(Event("round", time.time(), {"number": number, "nodes": list(hosts), "ranks": ranks, "why": why}))

    def write(self, event: Event) -> None:
        """Write an event of the round that was begun last."""
        self._events.copy(event)
        self._round = self._round.after(event)

    def close(self, outcome: Outcome) -> None:
        """Record the outcome of the newest round."""
        self._ended.append(
            replace(self._round, outcome=outcome.kind, type=outcome.type, error=outcome.error, step=outcome.step)
        )

    def verdict(self) -> Verdict:
        """Return whether another round makes sense."""
        return retry_verdict(self._ended, _RETRIES)


#: seconds between two looks at the heartbeats, which lie in files
_LOOK_S = 0.5
#: seconds that the nodes have to hand on the stacks of ranks that hang
_STACKS_S = 10.0


class RoundWatchdog:
    """The watchdog of a round, which looks seldom and remembers a hang.

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
