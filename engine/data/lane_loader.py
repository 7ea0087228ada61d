"""Map-style loaders for runs in lanes: one batch for each lane of this rank at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from midstride.engine.data.limits import limited
from midstride.engine.data.map_style import COUNTED, MapLoader
from midstride.engine.data.order import ENDLESS, BatchOrder, BatchRequest, InOrder, SampleOrder
from midstride.engine.data.sampler_order import SamplerOrder
from midstride.engine.errors import NotExact
from midstride.engine.lanes import Lanes
from midstride.engine.seeds import mix

__all__ = ["LaneLoader", "check_lanes", "nest_in_lanes"]


@dataclass(frozen=True)
class LaneOrder(BatchOrder):
    """Batches of a rank's lanes: the first of each lane, the second of each lane, and so on.

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

    def at(self, number: int) -> list[int]:
        """Return the lanes that have a batch `number`."""
        return [lane for lane, order in self.lanes.items() if number < self.limited(len(order))]

    def count(self, samples: int) -> int:
        """Return the batches of the longest lane in an epoch of `samples` samples."""
        return max(self.limited(order.count(samples)) for order in self.lanes.values())

    def requests(self, key: int, start: int, end: int = ENDLESS) -> Iterator[BatchRequest]:
        """Yield the requests of all lanes from batch `start` to `end`, lane by lane in each batch."""
        every = {lane: order.requests(key, start, end) for lane, order in self.lanes.items()}
        for number in range(start, min(end, len(self))):
            for lane in self.at(number):
                yield next(every[lane])


class LaneLoader(MapLoader):
    """A map-style DataLoader whose batches are dicts: lane of this rank -> its batch.

    All lanes share data set, workers and collate_fn. Samples and random numbers are functions of the lane, so a run can
    resume from any position with any number of ranks.
    """

    order: LaneOrder
    #: lane -> indices in the data set of the samples of its last batch; None if they have none
    indices_by_lane: dict[int, list[int] | None]
    fixed_world = None  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    @classmethod
    def of(cls, loader: MapLoader, lanes: Lanes) -> "LaneLoader":
        """Return a loader for all lanes of this rank, from a `loader` for one lane."""
        order: Any = loader.order
        if not loader.is_sized:
            raise NotExact(
                f"the {loader._what} loader with lanes: its sampler does not end: set limit_train_batches, or leave "
                "lanes out."
            )
        every = {lane: replace(order, rank=lane) for lane in lanes.own}
        return cls(
            loader.source,
            LaneOrder(every, partial(limited, limit=loader._limit)),
            loader._sampler.key,
            rng=loader._rng,  # pyright: ignore[reportArgumentType]
            what=loader._what,
        )

    def __len__(self) -> int:
        """Return the number of batches in an epoch on this rank, after the limit."""
        return len(self.order)

    @property
    def unlimited_batches(self) -> int:
        """Number of batches of the lane that has the most, before the limit."""
        return max(len(lane) for lane in self.order.lanes.values())

    def valid_world_sizes(self, size: int, batch_size: int) -> list[int]:
        """Return only `size`, since lanes do not depend on the number of ranks."""
        return [size]

    def batches(self, epoch: int, start: int = 0) -> Iterator[dict[int, Any]]:
        """Open `epoch`; return an iterator over its batches from batch `start` on."""
        self.order.sequence.open(epoch, resumed=start > 0)
        return self._read(epoch, start, len(self))

    def _read(self, epoch: int, start: int, end: int) -> Iterator[dict[int, Any]]:
        order = self.order
        if start >= end:
            return
        before = sum(min(start, order.limited(len(lane))) for lane in order.lanes.values())
        iterator = self._start_pass(epoch, start, end, before=before)
        for number in range(start, end):
            read: dict[int, Any] = {}
            weights: dict[int, Any] = {}
            for lane in order.at(number):
                read[lane] = self._next(iterator, number)
                weights[lane] = self.weight
            self.weight = weights
            self.at_end = number == end - 1
            if self.at_end:
                self._end_pass()
            self.indices_by_lane = {lane: indices for lane, (_, indices) in read.items()}
            yield {lane: batch for lane, (batch, _) in read.items()}

    def _opening(self, epoch: int) -> BatchRequest | None:
        """Return a request for the first samples of the epoch."""
        first: Any = next(iter(self.order.lanes.values()))
        return next(replace(first, rank=0).requests(mix(self._sampler.key, epoch), 0, 1), None)

    def planned_indices(self) -> Iterator[dict[int, list[Any]]] | None:  # type: ignore[override]
        """Return the indices of each batch by lane, as planned by a sampler in this epoch."""
        order = self.order
        has_changed = isinstance(order.sequence, InOrder) and order.sequence.has_changed
        if not (has_changed or "sampler" in order.sequence.identity) or len(order.sequence) > COUNTED:
            return None
        fetches = order.requests(0, 0)
        return ({lane: next(fetches).indices for lane in order.at(number)} for number in range(len(order)))

    def shared_order(self) -> str | None:
        """Return a digest of the sampler's order of the current epoch, or its length."""
        sequence = self.order.sequence
        return sequence.digest() if isinstance(sequence, SamplerOrder) else f"{len(sequence)} samples"


def check_lanes(loader: DataLoader[Any], name: str, *, shard: bool) -> None:
    """Check that the samples of a loader can be divided into lanes.

    Raises:
        NotExact: its data set is iterable, or its samples are divided by ranks already.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise NotExact(
            f"{name} with lanes: its {type(loader.dataset).__name__} is iterable, so a lane's samples are unknown "
            f"until they are read: use a map-style data set, or leave lanes out."
        )
    if not shard:
        raise NotExact(
            f"{name} with lanes: use_distributed_sampler=False gives every rank its own samples, but a lane needs "
            f"the same ones on any rank: leave it out."
        )
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        if getattr(sampler, "num_replicas", None) is not None:
            raise NotExact(
                f"{name} with lanes: its {type(sampler).__name__} assigns samples to ranks, but lanes are assigned "
                f"theirs here: leave it out, and set shuffle=True."
            )
        sampler = getattr(sampler, "sampler", None)


def nest_in_lanes(nest: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], dict[int, Any]]:
    """Return a function that nests the lanes' batches of several loaders, by lane."""

    def nested(values: Sequence[Any]) -> dict[int, Any]:
        lanes = next(value for value in values if value is not None)
        return {lane: nest([None if value is None else value[lane] for value in values]) for lane in lanes}

    return nested
