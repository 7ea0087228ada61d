"""Lanes: equal parts of each global batch, computed in the same way by any number of ranks.

A run of 8 lanes is that of 8 ranks, whatever number of them computes it: samples, random numbers, gradients, buffers,
logged values and metrics are functions of the lane, and what lanes have in common is added up in one order. A rank
runs its lanes one after another; they stand side by side, so that it can add up its own before it asks another rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

__all__ = ["InLane", "Lanes", "allowed_sizes", "tree_joins"]

#: returns the context in which an object is that of a lane
InLane = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True)
class Lanes:
    """The lanes of a run, and which of them this rank has.

    Args:
        count: lanes of the run, a power of two.
        rank: this rank, 0 <= rank < size.
        size: ranks that share the lanes, a power of two that is no larger than `count`.
    """

    count: int
    rank: int = 0
    size: int = 1

    @property
    def own(self) -> range:
        """The lanes of this rank, in the order in which it runs them."""
        each = self.count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def by_lane(self, ranks: Iterable[Mapping[int, Any]]) -> list[Any]:
        """Return the values of all lanes in order, from those of each rank."""
        every = {lane: value for rank in ranks for lane, value in rank.items()}
        return [every[lane] for lane in sorted(every)]

    def each(self, in_lane: InLane, call: Callable[[], Any]) -> dict[int, Any]:
        """Return the results of `call` in each lane of this rank."""
        results = {}
        for lane in self.own:
            with in_lane(lane):
                results[lane] = call()
        return results

    def state_dict(self, in_lane: InLane, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the states of the lanes of this rank as one."""
        return {"lanes": {str(lane): state for lane, state in self.each(in_lane, state_dict).items()}}

    def load_state_dict(self, in_lane: InLane, load: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """Restore the states of the lanes of this rank."""
        for lane in self.own:
            with in_lane(lane):
                load(state["lanes"][str(lane)])

    def resharded(self, states: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this rank's lanes, given the states of all ranks of the last attempt."""
        every = {lane: state for one in states for lane, state in one["lanes"].items()}
        return {"lanes": {str(lane): every[str(lane)] for lane in self.own}}


def allowed_sizes(count: int) -> list[int]:
    """Return the numbers of ranks that can share `count` lanes.

    >>> allowed_sizes(8)
    [1, 2, 4, 8]
    """
    return [size for size in range(1, count + 1) if count % size == 0 and size & (size - 1) == 0]


def tree_joins(leaves: Sequence[int]) -> list[tuple[int, int]]:
    """Return the additions (into, from) that reduce `leaves` to one sum at the first of them.

    Neighbours are added first, then sums of neighbours: a part that stands by itself in the tree gives the same sum
    wherever it is computed.

    >>> tree_joins([0, 1, 2, 3])
    [(0, 1), (2, 3), (0, 2)]
    """
    joins = []
    while len(leaves) > 1:
        pairs = [(leaves[i], leaves[i + 1]) for i in range(0, len(leaves), 2)]
        joins += pairs
        leaves = [into for into, _ in pairs]
    return joins
