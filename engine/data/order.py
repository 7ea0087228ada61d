"""The order of samples as a function of (seed, epoch, position): nothing to remember, nothing to replay.

An order is one sequence of samples an epoch, shared by the ranks strided as `DistributedSampler` shares it,
so that a global batch depends only on the global batch size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from midstride.engine.data.permutation import Permutation, Positions, permutation

__all__ = ["BatchOrder", "BatchRequest", "InOrder", "SampleOrder", "Shuffled", "StridedOrder"]

#: indices that are computed at once
BLOCK = 16_384


class BatchRequest(NamedTuple):
    """What travels to the data set for one batch.

    Args:
        key: of epoch and loader.
        first: position of its first sample in the epoch, over all ranks.
        stride: positions from one sample to the next.
        indices: what the data set is asked for.
        probe: samples for which to find out whether the data set gives the same again.
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
        """What a run's identity says of it."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many there are in an epoch."""

    @abstractmethod
    def open(self, epoch: int, *, resumed: bool) -> None:
        """Get ready for `epoch`; `resumed` in the middle of it, in another attempt."""

    @abstractmethod
    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the indices at `positions` of the epoch that is open."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the epoch's number does not say."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it back."""

    def clone(self) -> "SampleOrder":
        """Return a sequence that can be given a state while this one is read; itself where there is no state."""
        return self


class InOrder(SampleOrder):
    """0, 1, 2, ..."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    @property
    def identity(self) -> dict[str, Any]:
        """It is not shuffled."""
        return {"shuffle": False}

    def __len__(self) -> int:
        return self._samples

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Every epoch is the same."""

    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the positions themselves."""
        return list(positions.tolist())


class Shuffled(InOrder):
    """`DistributedSampler(seed=seed)`'s order: one permutation an epoch."""

    def __init__(self, samples: int, seed: int, sampler: str | None = None) -> None:
        super().__init__(samples)
        self._seed, self._sampler = seed, sampler
        self._epoch: int | None = None
        self._permutation: Permutation

    @property
    def identity(self) -> dict[str, Any]:
        """It is shuffled by the run's seed, or by a sampler that has its own."""
        return {"shuffle": True} if self._sampler is None else {"sampler": f"{self._sampler}(seed={self._seed})"}

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Draw the permutation of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, permutation(len(self), self._seed + epoch)

    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the samples at `positions`."""
        return list(self._permutation(positions).tolist())


class BatchOrder(ABC):
    """Which samples one rank reads, batch by batch.

    Args:
        sequence: what all ranks share.
    """

    sequence: SampleOrder
    #: samples in a full batch of this rank, and of all ranks; None where batches have no fixed size
    batch_size: int | None
    global_batch_size: int | None

    def clone(self) -> Self:
        """Return an order whose sequence can be given a state while this one is read."""
        return replace(self, sequence=self.sequence.clone())  # type: ignore[type-var]  # a dataclass

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches this rank reads in an epoch."""

    @abstractmethod
    def requests(self, key: int, start: int) -> Iterator[BatchRequest]:
        """Yield the batches of the epoch that is open, from batch `start` on."""


@dataclass(frozen=True)
class StridedOrder(BatchOrder):
    """Every size-th sample, in batches of a fixed size.

    Args:
        sequence: the samples of an epoch.
        batch_size: samples a rank takes at once.
        drop_last: leave out a last batch that is not full.
        rank: this rank, 0 <= rank < size.
        size: ranks that share the samples.
        rest: what becomes of samples that do not fill a round of all ranks: "padded" repeats samples from the start,
            as DistributedSampler does, and "dropped" leaves them out, as it does with drop_last=True; with "kept"
            some ranks have one more than others.
        own: the sequence holds this rank's samples alone, another one on every rank.
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
        """Samples that all ranks take at once."""
        return self.batch_size * self.size

    def rank_samples(self) -> int:
        """Return how many samples this rank reads in an epoch, padding included."""
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
        """Return everything this rank reads in `epoch`, in order, but for what `drop_last` leaves out."""
        self.sequence.open(epoch, resumed=False)
        return self._indices(np.arange(self.rank_samples()))

    def requests(self, key: int, start: int) -> Iterator[BatchRequest]:
        """Yield the batches of the epoch that is open from batch `start` on, at a cost that does not depend on `start`.

        Sample j of batch p sits at global position p * G + rank + j * size, with G the global batch size:
        its random numbers are a function of that position, whatever the number of ranks or workers.
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
