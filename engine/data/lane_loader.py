"""Map-style loaders of runs in lanes: a batch of every lane of this rank at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from midstride.engine.data.lane_order import LaneOrder
from midstride.engine.data.limits import limited
from midstride.engine.data.map_style import COUNTED, MapLoader
from midstride.engine.data.sampler_order import SamplerOrder
from midstride.engine.errors import NotExact
from midstride.engine.lanes import Lanes

__all__ = ["LaneLoader", "check_lanes", "nest_in_lanes"]


class LaneLoader(MapLoader):
    """A map-style DataLoader whose batches are dicts, from each lane of this rank to its batch.

    Data set, workers and collate are one for all lanes; a sample, its random numbers and those of collate are
    functions of the lane. So any number of ranks may go on from any position.
    """

    order: LaneOrder
    #: for each lane, the indices in the data set of the samples last handed out; None where they have none
    indices_by_lane: dict[int, list[int] | None]
    fixed_world = None  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    @classmethod
    def of(cls, loader: MapLoader, lanes: Lanes) -> "LaneLoader":
        """Return `loader`, which reads for one lane, so that it reads for all lanes of this rank."""
        order: Any = loader.order
        every = {lane: replace(order, rank=lane) for lane in lanes.own}
        return cls(
            loader.source,
            LaneOrder(every, partial(limited, limit=loader._limit)),
            loader._sampler.key,
            rng=loader._rng,  # pyright: ignore[reportArgumentType]
            what=loader._what,
        )

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank, after the limit."""
        return len(self.order)

    @property
    def unlimited_batches(self) -> int:
        """The batches of the lane that has the most, before the limit."""
        return max(len(lane) for lane in self.order.lanes.values())

    def valid_world_sizes(self, size: int, batch_size: int) -> list[int]:
        """Return `size`: the lanes are those that there are, whatever the number of ranks."""
        return [size]

    def batches(self, epoch: int, start: int = 0) -> Iterator[dict[int, Any]]:
        """Yield the batches of `epoch` from batch `start` on."""
        order, end = self.order, len(self)
        if start >= end:
            return
        ends = [order.limited(len(lane)) for lane in order.lanes.values()]
        before = sum(min(start, end) for end in ends)
        iterator = self._opened(epoch, start, sum(ends) - before, before=before)
        for number in range(start, end):
            read = {lane: self._next(iterator, number) for lane in order.at(number)}
            self.at_end = number == end - 1
            if self.at_end:
                self._data.end_pass()
            self.indices_by_lane = {lane: indices for lane, (_, indices) in read.items()}
            yield {lane: batch for lane, (batch, _) in read.items()}

    def planned_indices(self) -> Iterator[dict[int, list[Any]]] | None:  # type: ignore[override]
        """Return what a sampler gives the lanes of this rank in the epoch that is open, batch by batch."""
        order = self.order
        if "sampler" not in order.sequence.identity or len(order.sequence) > COUNTED:
            return None
        fetches = order.requests(0, 0)
        return ({lane: next(fetches).indices for lane in order.at(number)} for number in range(len(order)))

    def shared_order(self) -> str | None:
        """Return a digest of what a sampler gives all lanes in the epoch that is open."""
        sequence = self.order.sequence
        return sequence.digest() if isinstance(sequence, SamplerOrder) else None


def check_lanes(loader: DataLoader[Any], name: str, *, shard: bool) -> None:
    """Refuse a loader that cannot be dealt to lanes.

    Raises:
        NotExact: it is iterable, or its samples are dealt to ranks before they come here.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise NotExact(
            f"{name} with lanes: its {type(loader.dataset).__name__} is iterable, and which of its samples are a "
            "lane's only reading tells: use a map-style data set, or leave lanes out."
        )
    if not shard:
        raise NotExact(
            f"{name} with lanes: use_distributed_sampler=False gives every rank samples of its own, and "
            "lanes have to have theirs on any rank: leave it out."
        )
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        if getattr(sampler, "num_replicas", None) is not None:
            raise NotExact(
                f"{name} with lanes: its {type(sampler).__name__} deals samples to ranks, and lanes are dealt theirs "
                "here: leave it out, and say shuffle=True."
            )
        sampler = getattr(sampler, "sampler", None)


def nest_in_lanes(nest: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], dict[int, Any]]:
    """Return what makes of the batches of several loaders, each a dict by lane or None, one dict of nests by lane."""

    def nested(values: Sequence[Any]) -> dict[int, Any]:
        lanes = next(value for value in values if value is not None)
        return {lane: nest([None if value is None else value[lane] for value in values]) for lane in lanes}

    return nested
