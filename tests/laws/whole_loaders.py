"""Loaders that are no plain DataLoaders, one row each: read as a whole."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from laws.lives import BATCH, Samples
from laws.loaded import Wandering
from torch.utils.data import DataLoader, Dataset, Subset

from midstride.engine.world import World


def share(ranks: int, noise: float) -> Dataset[Any]:
    """Return the samples of this rank, for six batches of which the last one is not full."""
    world = World.from_environment()
    whole = Samples(6 * BATCH * ranks - 2, noise)
    return Subset(whole, range(world.rank, len(whole) - len(whole) % world.size, world.size))


class Zipped:
    """Two loaders side by side; the second starts over. Counts its passes."""

    def __init__(self, samples: Dataset[Any]) -> None:
        generator = torch.Generator().manual_seed(2)
        self.first = DataLoader(samples, BATCH, shuffle=True)
        self.second: Any = DataLoader(range(8), 2, shuffle=True, generator=generator)  # type: ignore[arg-type]
        self.passes = 0

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for (x, y, index), other in zip(self.first, itertools.cycle(self.second), strict=False):
            yield x + other.sum() / 100 + self.passes, y, index


class Converted(DataLoader[Any]):
    """A DataLoader that changes its batches, read by two workers."""

    def __iter__(self) -> Any:
        for x, y, index in super().__iter__():
            yield x * 2, y, index


def wandering(samples: Any) -> Converted:
    """Return a loader with a sampler that counts its passes, and draws."""
    return Converted(samples, BATCH, sampler=Wandering(len(samples)), num_workers=2)


class Repeating(DataLoader[Any]):
    """Continues one iterator, so that its workers stay, as that of timm does."""

    def __init__(self, samples: Dataset[Any]) -> None:
        super().__init__(samples, BATCH, shuffle=True)
        vars(self)["batch_sampler"] = Again(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        again: Any = self.batch_sampler
        return len(again.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Again:
    """A sampler over and over."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Stated:
    """Says how far it is, and in which pass, by which its order differs."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples: Any = samples
        self.passes = self.skip = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.skip = self.skip, 0
        self.passes += not start
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.passes)).tolist()
        for at in range(start, len(order), BATCH):
            self.at = at + BATCH
            yield torch.utils.data.default_collate([self.samples[index] for index in order[at : at + BATCH]])

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.skip = state["pass"], state["at"]


Make = Callable[[int, int, float], Any]

WHOLE: dict[str, Make] = {
    "two loaders, zipped": lambda ranks, workers, noise: Zipped(share(ranks, noise)),
    "a subclass of DataLoader": lambda ranks, workers, noise: Converted(share(ranks, noise), BATCH, num_workers=2),
    "a sampler of the user in it": lambda ranks, workers, noise: wandering(share(ranks, noise)),
    "one iterator for all epochs": lambda ranks, workers, noise: Repeating(share(ranks, noise)),
    "a loader that says its state": lambda ranks, workers, noise: Stated(share(ranks, noise)),
}
