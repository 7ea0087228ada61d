"""The order of samples as a function of seed, epoch and position, so that a resume needs no state and no replay.

An epoch has one sequence of samples, which the ranks share in strides, as with `DistributedSampler`. So the samples of
a global batch depend only on the global batch size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from midstride.engine.data.permutation import Permutation, Positions, permutation

__all__ = ["BatchOrder", "BatchRequest", "InOrder", "SampleOrder", "Shuffled", "StridedOrder"]

#: number of indices that are computed at once
BLOCK = 16_384


class BatchRequest(NamedTuple):
    """A request to the data set for one batch.

    Args:
        key: hash of epoch and loader, for random numbers.
        first: position of its first sample in the epoch, over all ranks.
        stride: distance between the positions of two samples.
        indices: indices of its samples in the data set, in order.
        probe: number of samples to read twice, to check that the data set gives the same again.
    """

    key: int
    first: int
    stride: int
    indices: list[Any]
    probe: int = 0


class SampleOrder(ABC):
    """The samples of an epoch in order, before ranks share them."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Entries of the run's identity that describe the order."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in an epoch."""

    @abstractmethod
    def open(self, epoch: int, *, resumed: bool) -> None:
        """Prepare the order of `epoch`; `resumed` if an earlier attempt has begun it."""

    @abstractmethod
    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the indices at `positions`, of shape (n,), of the current epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that does not follow from the number of the epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state."""

    def clone(self) -> "SampleOrder":
        """Return a sequence that can load a state while this one is read; itself if it has no state."""
        return self


class InOrder(SampleOrder):
    """The order 0, 1, 2, ..."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    @property
    def identity(self) -> dict[str, Any]:
        """{"shuffle": False}."""
        return {"shuffle": False}

    def __len__(self) -> int:
        return self._samples

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Do nothing: every epoch is the same."""

    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the positions themselves."""
        return list(positions.tolist())


class Shuffled(InOrder):
    """The order of `DistributedSampler(seed=seed)`: a permutation for each epoch."""

    def __init__(self, samples: int, seed: int, sampler: str | None = None) -> None:
        super().__init__(samples)
        self._seed, self._sampler = seed, sampler
        self._epoch: int | None = None
        self._permutation: Permutation

    @property
    def identity(self) -> dict[str, Any]:
        """That it is shuffled by the run's seed, or the name and seed of the user's sampler."""
        return {"shuffle": True} if self._sampler is None else {"sampler": f"{self._sampler}(seed={self._seed})"}

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Draw the permutation of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, permutation(len(self), self._seed + epoch)

    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the samples at `positions`."""
        return list(self._permutation(positions).tolist())


class BatchOrder(ABC):
    """The batches of one rank.

    Args:
        sequence: sequence of samples, which all ranks share.
    """

    sequence: SampleOrder
    #: number of samples in a full batch of this rank, and of all ranks; None if batches have no fixed size
    batch_size: int | None
    global_batch_size: int | None

    def clone(self) -> Self:
        """Return an order whose sequence can load a state while this one is read."""
        return replace(self, sequence=self.sequence.clone())  # type: ignore[type-var]  # a dataclass

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches this rank reads in an epoch."""

    @abstractmethod
    def requests(self, key: int, start: int) -> Iterator[BatchRequest]:
        """Yield requests for the batches of the current epoch, from batch `start` on; `key` is passed on in them."""


@dataclass(frozen=True)
class StridedOrder(BatchOrder):
    """Every size-th sample, in batches of a fixed size.

    Args:
        sequence: the samples of an epoch.
        batch_size: number of samples in a batch of this rank.
        drop_last: drop an incomplete last batch.
        rank: this rank, 0 <= rank < size.
        size: number of ranks that share the samples.
        rest: treatment of samples if their number is not divisible by `size`: "padded" repeats samples from the start,
            as DistributedSampler does; "dropped" leaves some out, as it does with drop_last=True; with "kept" some
            ranks have one more than others.
        own: whether the sequence holds the samples of this rank only, and differs between ranks.
    """

    sequence: SampleOrder
    batch_size: int  # pyright: ignore[reportIncompatibleVariableOverride]  # a frozen dataclass
    drop_last: bool = False
    rank: int = 0
    size: int = 1
    rest: Literal["padded", "dropped", "kept"] = "padded"
    own: bool = False

    @property
    def global_batch_size(self) -> int:  # type: ignore[override]
        """Number of samples in full batches of all ranks."""
        return self.batch_size * self.size

    def rank_samples(self) -> int:
        """Return the number of samples that this rank reads in an epoch, with padding."""
        samples = len(self.sequence)
        if self.own:
            return samples
        if self.rest == "kept":
            return len(range(self.rank, samples, self.size))
        return -(-samples // self.size) if self.rest == "padded" else samples // self.size

    def __len__(self) -> int:
        """Return the batches this rank reads in an epoch."""
        if self.drop_last:
            return self.rank_samples() // self.batch_size
        return -(-self.rank_samples() // self.batch_size)

    def indices(self, epoch: int) -> list[Any]:
        """Return the indices that this rank reads in `epoch`, in order, including those that `drop_last` leaves out."""
        self.sequence.open(epoch, resumed=False)
        return self._indices(np.arange(self.rank_samples()))

    def requests(self, key: int, start: int) -> Iterator[BatchRequest]:
        """Yield requests for the batches of the current epoch from batch `start` on, at a cost independent of `start`.

        Sample j of batch p is at the global position p * G + rank + j * size, where G is the global batch size. Its
        random numbers are a function of that position, whatever the number of ranks or workers.
        """
        batch_size, global_batch_size = self.batch_size, self.global_batch_size
        at_once = max(1, BLOCK // batch_size)
        for block in range(start, len(self), at_once):
            end = min(block + at_once, len(self))
            numbers = np.arange(block * batch_size, min(end * batch_size, self.rank_samples()))
            indices = self._indices(numbers)
            for batch in range(block, end):
                first = (batch - block) * batch_size
                first_position = batch * global_batch_size + self.rank
                yield BatchRequest(key, first_position, self.size, indices[first : first + batch_size])

    def _indices(self, numbers: Positions) -> list[Any]:
        if self.own:
            return self.sequence.indices_at(numbers)
        return self.sequence.indices_at((numbers * self.size + self.rank) % len(self.sequence))
