"""The order of samples where batches are cut in lanes: one order a lane, read side by side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from midstride.engine.data.order import BatchOrder, BatchRequest, SampleOrder

__all__ = ["LaneOrder"]


@dataclass(frozen=True)
class LaneOrder(BatchOrder):
    """The batches of the lanes of one rank: the first of each lane, the second of each lane, and so on.

    Args:
        lanes: the order of each, as if it were a rank of a world of so many; in evaluation some may have a batch less.
        limited: returns how many of a lane's batches are read.
    """

    lanes: dict[int, BatchOrder]
    limited: Callable[[int], int]

    @property
    def sequence(self) -> SampleOrder:  # type: ignore[override]
        """What all lanes share."""
        return self._first.sequence

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples in a full batch of a lane."""
        return self._first.batch_size

    @property
    def global_batch_size(self) -> int | None:  # type: ignore[override]
        """Samples that all lanes take at once."""
        return self._first.global_batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return getattr(self._first, "drop_last", False)

    @property
    def _first(self) -> BatchOrder:
        return next(iter(self.lanes.values()))

    def clone(self) -> "LaneOrder":
        """Return an order whose sequence can be given a state while this one is read."""
        sequence = self.sequence.clone()
        lanes: dict[int, Any] = dict(self.lanes)
        return replace(self, lanes={lane: replace(order, sequence=sequence) for lane, order in lanes.items()})

    def __len__(self) -> int:
        """Return the batches of the lane that has the most."""
        return max(self.limited(len(order)) for order in self.lanes.values())

    def at(self, number: int) -> list[int]:
        """Return the lanes that have a batch `number`."""
        return [lane for lane, order in self.lanes.items() if number < self.limited(len(order))]

    def requests(self, key: int, start: int) -> Iterator[BatchRequest]:
        """Yield the batches of every lane from batch `start` on, lane by lane."""
        every = {lane: order.requests(key, start) for lane, order in self.lanes.items()}
        for number in range(start, len(self)):
            for lane in self.at(number):
                yield next(every[lane])
