"""Windows: the batches of one optimizer step as one batch of a loader."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["WindowSampler", "window_batches", "window_loader"]


class WindowSampler:
    """Yields the indices of several batches as one list.

    Args:
        batches: a batch sampler whose batches are equally large, except for the last one.
        count: number of batches in a window; the last one of an epoch may have fewer.
    """

    def __init__(self, batches: Iterable[list[int]], count: int) -> None:
        self.batches, self.count = batches, count
        #: the process whose share `batches` are, by the names that samplers of torch use; those of accelerate's shards
        self.rank, self.num_replicas = getattr(batches, "process_index", 0), getattr(batches, "num_processes", 1)

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        batches: Any = self.batches
        return -(-len(batches) // self.count)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each window."""
        batches = iter(self.batches)
        while window := [*islice(batches, self.count)]:
            yield [index for batch in window for index in batch]


def window_batches(collate: Callable[[list[Any]], Any], size: int, samples: list[Any]) -> list[Any]:
    """Return the batches of a window.

    Args:
        collate: collates the samples of a batch.
        size: number of samples in a batch.
        samples: samples of the window.
    """
    return [collate(samples[start : start + size]) for start in range(0, len(samples), size)]


def window_loader(loader: Any, size: int, count: int) -> DataLoader[Any]:
    """Return a DataLoader of windows over the batches of `loader`.

    Args:
        loader: a DataLoader with a batch sampler.
        size: number of samples in a batch.
        count: number of batches in a window.
    """
    batches: Any = WindowSampler(loader.batch_sampler, count)
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        collate_fn=partial(window_batches, loader.collate_fn, size),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        **workers,
    )
