"""Which nodes train together: rounds that end when a node goes, when its ranks end, or when more can train.

Nothing here talks to anything: the server tells what it has heard, and asks what follows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstride.engine.config.world import WorldOptions

__all__ = ["Node", "Rounds"]

#: before the first round: between one node's coming and the next
_GATHER_S = 5.0
#: a node that ended so many rounds
_DEATHS = 2
#: of the last ones is left out
_ROUNDS = 10


@dataclass
class Node:
    """A machine that has joined, as it was when it last reported.

    Args:
        number: from 1, in the order of coming.
        host: its name.
        cores: it has.
        seen_at: when it last said something.
        is_ready: it waits for a round; a member of one that is ready has ended its ranks.
        is_done: they have come to the run's end.
        left: why it has gone; "" while it has not.
        stacks: how often its ranks have written theirs to the log.
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
        """Forget that it was ready: a round with it begins."""
        self.is_ready = self.is_done = False


class Rounds:
    """The nodes that have joined, and which of them train in the round.

    Args:
        options: how many there may be, and how long is waited for them.
        clock: seconds, for tests.
    """

    def __init__(self, options: "WorldOptions", clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._clock = options, clock
        self.machines = options.machines
        self._arrived = clock()
        self._training_since: float | None = None
        self._before: list[Node] = []
        self._deaths: list[tuple[int, str]] = []  # the round and the host that ended it
        self.nodes: dict[int, Node] = {}
        self.number = 0
        self.members: list[Node] = []

    def add(self, number: int, host: str, cores: int) -> None:
        """Add a node that has joined."""
        self._arrived = self._clock()
        self.nodes[number] = Node(number, host, cores, self._arrived)

    def hear(self, node: Node, *, waits: bool = False, is_done: bool = False, left: str = "", stacks: int = 0) -> None:
        """Update `node` by what it has reported: that it waits for a round, or leaves, or has written stacks."""
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
        """Return for how long nothing was heard of `node`."""
        return self._clock() - node.seen_at

    def is_silent(self, node: Node) -> bool:
        """Whether nothing was heard of `node` for too long."""
        return self.silence_s(node) > self._options.node_timeout_s

    def blame(self, node: Node) -> None:
        """Count that `node` has ended this round, by its death or that of its ranks."""
        self._deaths.append((self.number, node.host))

    def is_blamed(self, node: Node) -> bool:
        """Whether `node` has ended too many rounds: while there are enough without it, it waits."""
        return self._deaths_of(node) >= _DEATHS

    def blame_words(self, node: Node) -> str:
        """Return why a node that has ended too many rounds is left out."""
        times = self._deaths_of(node)
        return f"node {node.host} has ended {times} of the last {_ROUNDS} rounds: it waits while others are enough"

    def _deaths_of(self, node: Node) -> int:
        return sum(host == node.host and number > self.number - _ROUNDS for number, host in self._deaths)

    def present(self) -> list[Node]:
        """Return the nodes that are there."""
        return [node for node in self.nodes.values() if not node.left and not self.is_silent(node)]

    def end(self) -> tuple[str, str] | None:
        """Return how the round must end, "stop" or "kill", and why, "" where its ranks know; None if it goes on."""
        for node in self.members:
            if node.left:
                return "stop", f"{self.words(node)} leaves: {node.left}"
            if self.is_silent(node):
                return "kill", f"{self.words(node)} was silent for {self._options.node_timeout_s:g} s: it is left out"
        # The ranks of those that are done may be ahead of the others, which come to the end as well.
        if any(node.is_ready and not node.is_done for node in self.members) or self.have_left():
            return "stop", ""
        if self._has_trained():
            waiting = [node for node in self._waiting() if not self.is_blamed(node)]
            if self.machines.training(len(self.members) + len(waiting)) > len(self.members):
                return "stop", f"{_list([node.host for node in waiting])} can train as well"
        return None

    def train(self) -> None:
        """Keep when the round has taken its first step: from then on there is something to lose."""
        if self._training_since is None:
            self._training_since = self._clock()

    def _has_trained(self) -> bool:
        """Whether the round has trained for so long that it may be ended for a larger one."""
        grow_s, since = self._options.grow_after_s, self._training_since
        return grow_s is not None and since is not None and self._clock() - since >= grow_s

    def words(self, node: Node) -> str:
        """Return the name of a node that trains, with its ranks."""
        ranks = self.ranks(node)
        said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"node {node.host} ({said})"

    def have_left(self) -> bool:
        """Whether no rank of the round can be at work any more, as far as is known."""
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
        good = [node for node in waiting if not self.is_blamed(node)]
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
        """Return a key to sort nodes by: those that trained keep their order, and so their ranks and their data."""
        return (self._before.index(node) if node in self._before else len(self._before), node.number)


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
