"""The order of samples as a function of (seed, epoch, position): nothing to remember, nothing to replay.

All orders are those of `torch.utils.data.DistributedSampler`: one permutation an epoch, shared by
the ranks strided, so that a global batch depends only on the global batch size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["EvaluationOrder", "Fetch", "Order", "TrainingOrder"]

#: what travels to the dataset for one batch: (key of epoch and loader, first global position, stride, indices)
Fetch = tuple[int, int, int, list[int]]


@dataclass(frozen=True)
class Order(ABC):
    """Which samples one rank reads, batch by batch.

    Args:
        samples: samples in the data set.
        batch_size: samples a rank takes at once.
        drop_last: leave out a last batch that is not full.
        rank: this rank, 0 <= rank < size.
        size: ranks that share the samples.
    """

    samples: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    size: int = 1

    @abstractmethod
    def rank_samples(self) -> int:
        """Return how many samples this rank reads in an epoch."""

    @abstractmethod
    def indices(self, epoch: int) -> list[int]:
        """Return the samples this rank reads in `epoch`, in order."""

    def __len__(self) -> int:
        """Return the batches this rank reads in an epoch."""
        if self.drop_last:
            return self.rank_samples() // self.batch_size
        return -(-self.rank_samples() // self.batch_size)

    def fetches(self, key: int, epoch: int, start: int) -> Iterator[Fetch]:
        """Yield the batches of `epoch` from batch `start` on.

        Sample j of batch p sits at global position p * G + rank + j * size, with G the global batch size:
        its random numbers are a function of that position, whatever the number of ranks or workers.
        """
        indices = self.indices(epoch)
        size, batch_size = self.size, self.batch_size
        for batch in range(start, len(self)):
            first = batch * batch_size
            yield key, first * size + self.rank, size, indices[first : first + batch_size]


@dataclass(frozen=True)
class TrainingOrder(Order):
    """Every rank the same number of samples: the end is padded from the start, as DistributedSampler pads."""

    seed: int = 0
    shuffle: bool = True

    def rank_samples(self) -> int:
        """Return how many samples this rank reads in an epoch, padding included."""
        return -(-self.samples // self.size)

    def indices(self, epoch: int) -> list[int]:
        """Return `DistributedSampler(seed=seed)`'s indices for `epoch`."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.samples, generator=generator)
        else:
            order = torch.arange(self.samples)
        total = self.rank_samples() * self.size
        repeats = -(-total // self.samples)
        return order.repeat(repeats)[:total][self.rank :: self.size].tolist()


@dataclass(frozen=True)
class EvaluationOrder(Order):
    """In order, every sample once over all ranks, nothing padded: ranks may read different numbers of batches."""

    def rank_samples(self) -> int:
        """Return how many samples this rank reads."""
        return len(range(self.rank, self.samples, self.size))

    def indices(self, epoch: int) -> list[int]:
        """Return every size-th sample, starting at this rank; the same in every epoch."""
        return list(range(self.rank, self.samples, self.size))
