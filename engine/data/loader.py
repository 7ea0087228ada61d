"""What a loop reads: batches from any position of any epoch, and what decides their order."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from midstride.engine.state.stateful import AlikeOnRanks

__all__ = ["FitLoaders", "ResumableLoader"]


class ResumableLoader(ABC):
    """Batches of one rank, the same ones whether it came to a position by walking or by resuming there.

    It keeps no position: the loop counts, and says where to start.
    """

    #: the batches of an epoch on the rank that has the most; see `set_max_batches`
    max_batches: int
    #: samples in a full batch of this rank; None where batches have no fixed size
    batch_size: int | None
    #: whether the batch handed out last is the epoch's last one; in training that holds on every rank at once
    at_end: bool = False
    #: whether the batch handed out last begins a pass of one of several loaders, on every rank at once
    begins_pass: bool = False
    #: whether `len` tells; if not, only reading to the end does
    is_sized: bool = True
    #: indices in the data set of the samples last handed out, in order; None where they have none
    last_indices: Sequence[int] | None = None
    #: digest of the samples last handed out and of where they stand in the epoch, where they have no indices
    last_mark: int | None = None
    #: whether what is read, when it is resumed, goes on from a state that it gave
    had_states: bool = False
    #: why a run cannot go on with another number of ranks, as text; None if it can
    fixed_world: str | None = None

    def set_max_batches(self, batches: int) -> None:
        """Set how many batches the rank with the most of them has, which only the ranks together know."""
        self.max_batches = batches

    def stand_at_end(self, at_end: bool) -> None:
        """Stand where the epoch's last batch was handed out, in another attempt, or where none of its epoch was."""
        self.at_end = at_end

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches of an epoch on this rank, after the limit."""

    @property
    def estimated_batches(self) -> int | None:
        """The batches of an epoch as far as is known: exact for a sized loader, else a hint or None."""
        return len(self)

    @property
    def unlimited_batches(self) -> int | None:
        """The batches of an epoch before the limit, as far as is known."""
        return self.estimated_batches

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of `epoch` from batch `start` on, to the end of the epoch.

        Started in the middle, that is the pass in which `state_dict` was taken, resumed.
        """

    def valid_world_sizes(self, size: int, batch_size: int) -> list[int]:
        """Return the numbers of ranks at which the epoch has the batches that `size` ranks of `batch_size` give it."""
        return [size]

    def resize(self, batch_size: int) -> None:
        """Read `batch_size` samples at once on this rank; called only where `fixed_world` is None."""
        raise NotImplementedError(f"{type(self).__name__} has no resize: write one, or give the loader a fixed_world")

    def planned_indices(self) -> Iterable[Sequence[Any]] | None:
        """Return what a sampler gives this rank in the epoch that is open, batch by batch.

        None where there is no sampler, or its order is a function of the epoch.
        """
        return None

    def read_digest(self) -> int | None:
        """Return the sum of `last_mark` over the epoch so far, as those say that have read it; None if they cannot."""
        return None

    def changed_in_pass(self) -> str | None:
        """Return what of the data has changed since the pass began, in a clause; None if nothing that counts has.

        It counts where the position in the pass is found by reading the data again, which then gives other samples.
        """
        return None

    def shared_order(self) -> str | None:
        """Return a digest of the order that all ranks share in the epoch that is open, where training may change it."""
        return None

    @abstractmethod
    def order_identity(self) -> dict[str, Any]:
        """Return what decides the order of samples, as JSON; it belongs to the run's identity.

        `global_batch_size`, where there is one, counts the samples that all ranks take at once.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what cannot be found from a position alone, on this rank, as of the last batch handed out."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it back; called before the first `batches` of an attempt."""

    def restored(self) -> None:
        """Take note that all of a state is back, also what the data hold; called after `load_state_dict`."""
        return

    def close(self) -> None:
        """End what reads ahead: nothing more will be read."""
        return

    def clone(self) -> Self:
        """Return a loader that can be given a state while this one is read."""
        return copy.copy(self)


class FitLoaders(AlikeOnRanks):
    """The loaders of a fit as one part of a run's state.

    Args:
        training: what is trained on.
        validation: what is validated on, one for each `dataloader_idx`.
        given: the user's own, by stage: "train" and "validate".
    """

    description = "what a loader holds"

    def __init__(
        self,
        training: ResumableLoader,
        validation: Sequence[ResumableLoader] = (),
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.training, self.validation, self.given = training, list(validation), given

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every loader."""
        return {
            "training": self.training.state_dict(),
            "validation": [loader.state_dict() for loader in self.validation],
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it back."""
        self.training.load_state_dict(state_dict["training"])
        for loader, state in zip(self.validation, state_dict["validation"], strict=True):
            loader.load_state_dict(state)

    def restored(self) -> None:
        """Tell every loader that all of the state is back."""
        for loader in (self.training, *self.validation):
            loader.restored()

    def clone(self) -> "FitLoaders":
        """Return loaders that can be given a state while these are read."""
        return FitLoaders(self.training.clone(), [loader.clone() for loader in self.validation], self.given)
