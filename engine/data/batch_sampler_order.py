"""The order of a batch sampler, torch's or the user's: its batches in turn to the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from midstride.engine.data.order import ENDLESS, BatchOrder, BatchRequest
from midstride.engine.data.sampler_order import SamplerOrder

__all__ = ["BatchSamplerOrder"]

#: number of batches of each rank that are dealt at once
_AT_ONCE = 16


@dataclass
class BatchSamplerOrder(BatchOrder):
    """The batches of a batch sampler, given to the ranks in turn.

    Args:
        sequence: order whose items are batches.
        rank: this rank, 0 <= rank < size.
        size: number of ranks that share the batches: batch q goes to rank q mod size.
        rest: "padded" repeats batches from the start, so that all ranks have the same number; "kept" does not.
        own: whether the sequence holds the batches of this rank only.
    """

    sequence: SamplerOrder  # pyright: ignore[reportIncompatibleVariableOverride]  # a frozen dataclass
    rank: int = 0
    size: int = 1
    rest: Literal["padded", "kept"] = "padded"
    own: bool = False
    batch_size: int | None = None
    global_batch_size: int | None = None

    def count(self, samples: int) -> int:
        """Return the batches this rank reads of an epoch of `samples` batches."""
        if self.own:
            return samples
        return -(-samples // self.size) if self.rest == "padded" else len(range(self.rank, samples, self.size))

    def requests(self, key: int, start: int, end: int = ENDLESS) -> Iterator[BatchRequest]:
        """Yield requests for batches of the current epoch, from `start` to `end` or its end.

        The position of a sample is that in all batches one after the other; a repeated batch keeps its positions.
        """
        readers = 1 if self.own else self.size
        opening: list[tuple[int, list[Any]]] = []  # first batches with the positions of their first samples
        first = 0
        for block in range(0, end, _AT_ONCE):
            stop = min(block + _AT_ONCE, end)
            batches = self.sequence.count_to(stop * readers)
            numbers = range(block * readers, min(stop * readers, batches))
            dealt = []
            for batch in map(list, self.sequence.indices_at(np.arange(numbers.start, numbers.stop))):
                dealt.append((first, batch))
                first += len(batch)
            opening = opening or dealt[:readers]
            last = min(stop, self.count(batches))
            dealt += [opening[number % batches] for number in range(numbers.stop, last * readers)]
            for number in range(max(block, start), last):
                at, batch = dealt[(number - block) * readers + (0 if self.own else self.rank)]
                if self.own:  # positions of ranks alternate
                    yield BatchRequest(key, at * self.size + self.rank, self.size, batch)
                else:
                    yield BatchRequest(key, at, 1, batch)
            if len(numbers) < (stop - block) * readers:
                return
