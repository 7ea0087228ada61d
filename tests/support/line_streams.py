"""Streams of numbers, with and without a state, and a loader of them."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.loader import ResumableLoader

#: what was read in this process, by whatever copy of a data set
READ: list[int] = []


class Lines(IterableDataset[int]):
    """Numbers, sharded over the workers."""

    def __init__(self, samples: int = 20) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for number in range(info.id if info else 0, self.samples, info.num_workers if info else 1):
            READ.append(number)
            yield number


class Stateful(Lines):
    """Carries `weight` bytes in its state."""

    weight, at = 0, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.at, self.samples):
            self.at = number + 1
            READ.append(number)
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "weight": torch.zeros(self.weight, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Drawn(Lines):
    def __init__(self, samples: int = 20) -> None:
        super().__init__(samples)
        self.sampler = range(samples)

    def __iter__(self) -> "Drawn":
        self.indices = iter(self.sampler)
        return self

    def __next__(self) -> int:
        number = next(self.indices)
        READ.append(number)
        return number


def feed_of(
    dataset: Any, batch_size: int | None = 4, *, check_repeatability: bool = False, **options: Any
) -> ResumableLoader:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size, **options)
    return IterableLoader(
        loader, name="the training loader", key=3, limit=1.0, check_repeatability=check_repeatability, agree=bool
    )


def resumed(dataset: Any, state: dict[str, Any], start: int) -> list[Any]:
    """Return what a new life reads from batch `start` on, with `READ` holding what it took to get there."""
    feed = feed_of(dataset)
    feed.load_state_dict(copy.deepcopy(state))
    READ.clear()
    return [batch.tolist() for batch in feed.batches(0, start)]


def after(dataset: Any, batches: int) -> dict[str, Any]:
    """Return the state after so many batches."""
    feed = feed_of(dataset)
    for _, _batch in zip(range(batches), feed.batches(0), strict=False):
        pass
    return copy.deepcopy(feed.state_dict())
