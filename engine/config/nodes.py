"""Numbers of machines of a world, and those that can share its batches. No torch."""

import math
from dataclasses import dataclass

from midstride.engine.formatting import format_count
from midstride.engine.lanes import allowed_sizes

__all__ = ["Nodes"]


@dataclass(frozen=True)
class Nodes:
    """The numbers of machines of a world, each with the same number of ranks.

    Args:
        least: the smallest number with which a round begins.
        most: the largest number that trains; further machines wait.
        processes: ranks on each machine.
        lanes: lanes of the run, which the ranks share; None if it has none.
        batch: samples of a global batch, which the ranks share equally; None if each rank has its own batches.

    >>> Nodes.parse("1:4", processes=2, lanes=8).usable
    [1, 2, 4]
    """

    least: int
    most: int
    processes: int = 1
    lanes: int | None = None
    batch: int | None = None

    @classmethod
    def parse(cls, text: str, *, processes: int = 1, lanes: int | None = None, batch: int | None = None) -> "Nodes":
        """Parse a job's `nodes`: "4", or "1:4" for at least one and at most four."""
        least, _, most = text.partition(":")
        return cls(int(least), int(most or least), processes, lanes, batch)

    @property
    def usable(self) -> list[int]:
        """The numbers of nodes that can train, the smallest first."""
        every = range(self.least, self.most + 1)
        if self._shared is None:
            return [*every] if len(every) == 1 else []
        sizes = set(self._sizes)
        return [nodes for nodes in every if nodes * self.processes in sizes]

    @property
    def _sizes(self) -> list[int]:
        """The numbers of ranks that can share the lanes or the batch."""
        if self.lanes is not None:
            return allowed_sizes(self.lanes)
        batch = self.batch or 1
        return [ranks for ranks in range(1, batch + 1) if batch % ranks == 0]

    @property
    def _shared(self) -> str | None:
        """Return the shared quantity of all ranks for messages."""
        if self.lanes is not None:
            return f"{self.lanes} lanes"
        return None if self.batch is None else f"batches of {self.batch} samples"

    def training(self, ready: int) -> int:
        """Return how many of `ready` nodes train; 0 if they are too few."""
        return max((nodes for nodes in self.usable if nodes <= ready), default=0)

    @property
    def errors(self) -> list[str]:
        """Messages about numbers with which the world could never train, or not always the same run."""
        if self.lanes is not None and self.batch is not None:
            return [
                f"global_batch_size {self.batch} with lanes, each of which has the loader's batch_size: leave one out"
            ]
        if self.most < self.least:
            return [f"nodes {self.least}:{self.most}: at least {self.least} and at most {self.most} is no range"]
        if self.most == 1 and self.batch is None:
            return []  # one machine: more machines would not help its ranks
        if self._shared is None and self.most > self.least:
            return [
                f"nodes {self.least}:{self.most} without lanes: the number of samples per step would depend on the "
                f"number of machines: set lanes, such as lanes: {self._fitting_lanes()}, or the samples per step, "
                f'such as global_batch_size: {self._fitting_batch()}, or one number of machines: nodes: "{self.most}"'
            ]
        if not self.usable and self.most == 1:
            return [f"{self.processes} processes cannot share {self._shared}: {_listed(self._sizes)} can"]
        if not self.usable:
            return [
                f"nodes {self.least}:{self.most} of {self.processes} processes: no number of them can share "
                f"{self._shared}: ranks that can are {_listed(self._sizes)}"
            ]
        return []

    def _fitting_lanes(self) -> int:
        """The smallest power of two that is not below the largest number of ranks."""
        return 1 << (self.most * self.processes - 1).bit_length()

    def _fitting_batch(self) -> int:
        """The smallest number of samples that every number of nodes can share."""
        return math.lcm(*range(self.least, self.most + 1)) * self.processes

    def sentences(self) -> list[str]:
        """Return a line for each number of nodes: how many ranks it has, and whether they can train."""
        lines = []
        for ready in range(self.least, self.most + 1):
            ranks, used = ready * self.processes, self.training(ready)
            what = f"{format_count(ready, 'node')} ({format_count(ranks, 'rank')})"
            if used == ready:
                lines.append(f"{what} will do")
                continue
            then = f"{format_count(used, 'node')} of them train, the rest wait" if used else "they wait for more"
            lines.append(f"{what} cannot share {self._shared}: {then}")
        return lines


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
