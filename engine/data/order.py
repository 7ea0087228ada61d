"""Order of samples, a function of seed, epoch and position: no state, no replay.

An epoch has one sequence of samples, which the ranks share in strides, as with `DistributedSampler`. So the samples of
a global batch depend only on the global batch size.
"""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from midstride.engine.data.permutation import Permutation, Positions, permutation

__all__ = ["ENDLESS", "BatchOrder", "BatchRequest", "InOrder", "SampleOrder", "Shuffled", "StridedOrder"]

#: number of indices that are computed at once
BLOCK = 16_384
#: number of batches that no epoch has
ENDLESS = sys.maxsize


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
    """The samples of an epoch in order, before ranks share them.

    Epochs may have different numbers of samples; before the first epoch is opened, the number is that of the first.
    """

    #: whether the number of samples is known when an epoch is opened; else the order is drawn in blocks
    is_sized: bool = True
    #: name of the sampler that does not end; None if epochs end
    endless: str | None = None

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Entries of the run's identity that describe the order."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in the current epoch; TypeError unless `is_sized`."""

    @abstractmethod
    def open(self, epoch: int, *, resumed: bool) -> None:
        """Prepare the order of `epoch`; `resumed` if an earlier attempt has begun it."""

    @abstractmethod
    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the indices at `positions`, of shape (n,), of the current epoch."""

    def count_to(self, position: int) -> int:
        """Return the samples in the current epoch, or a number above `position` if there are more."""
        return len(self)

    def close(self) -> None:
        """Handle that the last batch of the epoch was returned."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state that does not follow from the number of the epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state."""

    def clone(self) -> "SampleOrder":
        """Return a sequence that can load a state while this one is read; itself if it has no state."""
        return self


class InOrder(SampleOrder):
    """The order 0, 1, 2, ...

    Args:
        samples: number of samples when the loader was built.
        now: returns the present number of samples, for data that grow or shrink; it counts from the next epoch.
    """

    def __init__(self, samples: int, now: Callable[[], int] | None = None) -> None:
        self._built = self._samples = samples
        self._now = now

    @property
    def identity(self) -> dict[str, Any]:
        """{"shuffle": False}."""
        return {"shuffle": False}

    @property
    def has_changed(self) -> bool:
        """Whether the current epoch has another number of samples than when the loader was built."""
        return self._samples != self._built

    def __len__(self) -> int:
        return self._samples

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Restart the count of samples, unless the epoch is resumed."""
        if self._now is not None and not resumed:
            self._samples = self._now()

    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the positions themselves."""
        return list(positions.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples, if it has changed since the loader was built."""
        return {"samples": self._samples} if self.has_changed else {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the number of samples."""
        self._samples = state_dict.get("samples", self._built)

    def clone(self) -> "SampleOrder":
        """Return a copy."""
        return copy.copy(self)


class Shuffled(InOrder):
    """The order of `DistributedSampler(seed=seed)`: a permutation for each epoch."""

    def __init__(
        self, samples: int, seed: int, sampler: str | None = None, now: Callable[[], int] | None = None
    ) -> None:
        super().__init__(samples, now)
        self._seed, self._sampler = seed, sampler
        #: epoch and number of samples of the permutation
        self._drawn: tuple[int, int] | None = None
        self._permutation: Permutation

    @property
    def identity(self) -> dict[str, Any]:
        """Return a mark of shuffling by the run's seed, or name and seed of the user's sampler."""
        return {"shuffle": True} if self._sampler is None else {"sampler": f"{self._sampler}(seed={self._seed})"}

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Draw the permutation of `epoch`."""
        super().open(epoch, resumed=resumed)
        if self._drawn != (epoch, len(self)):
            self._drawn, self._permutation = (epoch, len(self)), permutation(len(self), self._seed + epoch)

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

    def __len__(self) -> int:
        """Return the batches this rank reads in the current epoch."""
        return self.count(len(self.sequence))

    @abstractmethod
    def count(self, samples: int) -> int:
        """Return this rank's batches in an epoch of `samples` samples, or of a batch sampler."""

    @abstractmethod
    def requests(self, key: int, start: int, end: int = ENDLESS) -> Iterator[BatchRequest]:
        """Yield requests for batches of the current epoch, from `start` to `end` or its end.

        Args:
            key: passed on in the requests.
            start: number of the first batch.
            end: number of the batch after the last one; samples after it are not drawn.
        """


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

    def rank_samples(self, samples: int | None = None) -> int:
        """Return the number of samples that this rank reads of an epoch of `samples`, with padding."""
        samples = len(self.sequence) if samples is None else samples
        if self.own:
            return samples
        if self.rest == "kept":
            return len(range(self.rank, samples, self.size))
        return -(-samples // self.size) if self.rest == "padded" else samples // self.size

    def count(self, samples: int) -> int:
        """Return the batches this rank reads of an epoch of `samples` samples."""
        if self.drop_last:
            return self.rank_samples(samples) // self.batch_size
        return -(-self.rank_samples(samples) // self.batch_size)

    def indices(self, epoch: int) -> list[Any]:
        """Return this rank's indices in `epoch`, in order, with those that `drop_last` drops."""
        self.sequence.open(epoch, resumed=False)
        return self._indices(np.arange(self.rank_samples()), len(self.sequence))

    def requests(self, key: int, start: int, end: int = ENDLESS) -> Iterator[BatchRequest]:
        """Yield requests for batches of the epoch, at a cost independent of `start` if `is_sized`.

        Sample j of batch p is at the global position p * G + rank + j * size, where G is the global batch size. Its
        random numbers are a function of that position, whatever the number of ranks or workers.
        """
        batch_size, global_batch_size = self.batch_size, self.global_batch_size
        drawn = batch_size if self.own else global_batch_size  # samples of the sequence in a batch of all its readers
        at_once = max(1, BLOCK // (batch_size if self.sequence.is_sized else drawn))
        for block in range(start, end, at_once):
            stop = min(block + at_once, end)
            samples = self.sequence.count_to(stop * drawn)
            stop = min(stop, self.count(samples))
            numbers = np.arange(block * batch_size, min(stop * batch_size, self.rank_samples(samples)))
            indices = self._indices(numbers, samples)
            for batch in range(block, stop):
                first = (batch - block) * batch_size
                first_position = batch * global_batch_size + self.rank
                yield BatchRequest(key, first_position, self.size, indices[first : first + batch_size])
            if stop < min(block + at_once, end):
                return

    def _indices(self, numbers: Positions, samples: int) -> list[Any]:
        if self.own:
            return self.sequence.indices_at(numbers)
        return self.sequence.indices_at((numbers * self.size + self.rank) % samples)
