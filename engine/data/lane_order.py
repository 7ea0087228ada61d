"""The order of samples in lanes: each lane has an order, and they are read side by side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from midstride.engine.data.order import BatchOrder, BatchRequest, SampleOrder

__all__ = ["LaneOrder"]


@dataclass(frozen=True)
class LaneOrder(BatchOrder):
    """The batches of the lanes of one rank: the first of each lane, the second of each lane, and so on.

    Args:
        lanes: lane -> its order, as that of a rank in a world with one rank per lane; in evaluation some lanes may have
            one batch less.
        limited: function from the number of a lane's batches to the number that is read.
    """

    lanes: dict[int, BatchOrder]
    limited: Callable[[int], int]

    @property
    def sequence(self) -> SampleOrder:  # type: ignore[override]
        """The sequence of samples, which all lanes share."""
        return self._first.sequence

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Number of samples in a full batch of a lane."""
        return self._first.batch_size

    @property
    def global_batch_size(self) -> int | None:  # type: ignore[override]
        """Number of samples in full batches of all lanes."""
        return self._first.global_batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is dropped."""
        return getattr(self._first, "drop_last", False)

    @property
    def _first(self) -> BatchOrder:
        return next(iter(self.lanes.values()))

    def clone(self) -> "LaneOrder":
        """Return an order whose sequence can load a state while this one is read."""
        sequence = self.sequence.clone()
        lanes: dict[int, Any] = dict(self.lanes)
        return replace(self, lanes={lane: replace(order, sequence=sequence) for lane, order in lanes.items()})

    def __len__(self) -> int:
        """Return the number of batches of the lane that has the most."""
        return max(self.limited(len(order)) for order in self.lanes.values())

    def at(self, number: int) -> list[int]:
        """Return the lanes that have a batch `number`."""
        return [lane for lane, order in self.lanes.items() if number < self.limited(len(order))]

    def requests(self, key: int, start: int) -> Iterator[BatchRequest]:
        """Yield the requests of all lanes from batch `start` on: for each batch number, one of each lane."""
        every = {lane: order.requests(key, start) for lane, order in self.lanes.items()}
        for number in range(start, len(self)):
            for lane in self.at(number):
                yield next(every[lane])
