"""`ResumableLoader`: base class of loaders that a loop can read from any batch of any epoch."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from midstride.engine.data.bad_samples import BadSample
from midstride.engine.data.data_check import DataDigests
from midstride.engine.state.stateful import AlikeOnRanks

__all__ = ["FitLoaders", "ResumableLoader"]


class ResumableLoader(ABC):
    """The batches of one rank, which are the same after a resume as without an interruption.

    The loop counts the batches, and passes the position to start from.
    """

    #: number of samples in a full batch of this rank; None if batches have no fixed size
    batch_size: int | None
    #: whether the last batch that was returned is the last of the epoch; in training, the same on every rank
    at_end: bool = False
    #: whether the last batch that was returned is the first of a pass of one of several loaders, on every rank
    begins_pass: bool = False
    #: whether the number of batches is known when an epoch is opened; epochs may differ in it
    is_sized: bool = True
    #: name of the sampler that does not end; None if epochs end
    endless: str | None = None
    #: indices in the data set of the samples of the last batch, in order; None if they have none
    last_indices: Sequence[int] | None = None
    #: number of samples of the last batch, however it packs them; None if only the batch tells
    last_samples: int | None = None
    #: the same for means of logged values, with lanes by lane; None as well if a sample may be a whole batch
    weight: int | Mapping[int, int | None] | None = None
    #: digest of the samples of the last batch and of their position in the epoch, for samples without indices
    last_mark: int | None = None
    #: whether a resume of the current pass would load a state of the data set
    had_states: bool = False
    #: why a run cannot resume with another number of ranks, as text; None if it can
    fixed_world: str | None = None

    def set_at_end(self, at_end: bool) -> None:
        """Set whether the epoch's last batch was returned, such as by an earlier attempt."""
        self.at_end = at_end

    @abstractmethod
    def __len__(self) -> int:
        """Return this rank's batches, after the limit, in the last opened epoch or the first.

        Raises:
            TypeError: not `is_sized`.
        """

    @property
    def estimated_batches(self) -> int | None:
        """Number of batches in an epoch: exact for a sized loader, else an estimate or None."""
        return len(self)

    @property
    def unlimited_batches(self) -> int | None:
        """Number of batches in an epoch before the limit, exact or estimated; None if unknown."""
        return self.estimated_batches

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Open `epoch`; return an iterator over its batches from `start` on.

        With `start` > 0, it resumes the pass whose state was loaded.
        """

    def valid_world_sizes(self, size: int, batch_size: int) -> list[int]:
        """Return the world sizes with the global batches of `size` ranks with `batch_size` each."""
        return [size]

    def resize(self, batch_size: int) -> None:
        """Set the batch size of this rank; called only if `fixed_world` is None."""
        raise NotImplementedError(f"{type(self).__name__} has no resize: write one, or give the loader a fixed_world")

    def planned_indices(self) -> Iterable[Sequence[Any]] | None:
        """Return the items of each batch that a sampler gives this rank in the current epoch.

        None if there is no sampler, or its order is a function of the epoch.
        """
        return None

    def read_digest(self) -> int | None:
        """Return the sum of `last_mark` over the epoch, as its readers count; None if unknown."""
        return None

    def changed_in_pass(self) -> str | None:
        """Return text on data changed since the pass began, which could not be resumed; or None.

        Changes matter if a resume would read the data again, and get other samples.
        """
        return None

    def data_digests(self) -> Sequence[DataDigests]:
        """Return digests of samples to compare over ranks and attempts, once after the first batch."""
        return ()

    def take_bad_samples(self) -> list[BadSample]:
        """Return the samples that could not be read since the last call."""
        return []

    def accept_data(self) -> None:
        """Compare no more with the samples of earlier attempts."""
        return

    def shared_order(self) -> str | None:
        """Return a digest of the epoch's order shared by all ranks; None if it cannot change."""
        return None

    @abstractmethod
    def order_identity(self) -> dict[str, Any]:
        """Return the settings that decide the order of samples, as JSON values for the identity.

        The key `global_batch_size`, if present, is the number of samples in a batch over all ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state after the last returned batch, besides its position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state; called before the first `batches` of an attempt."""

    def restored(self) -> None:
        """Finish a restore of all state, data sets included; called after `load_state_dict`."""
        return

    def close(self) -> None:
        """End workers; nothing more will be read."""
        return

    def clone(self) -> Self:
        """Return a loader that can load a state while this one is read."""
        return copy.copy(self)


class FitLoaders(AlikeOnRanks):
    """The loaders of a fit as one part of a run's state.

    Args:
        training: training loader.
        validation: validation loaders, by `dataloader_idx`.
        given: the user's loaders by stage, "train" and "validate".
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
        """Restore the state of every loader."""
        self.training.load_state_dict(state_dict["training"])
        for loader, state in zip(self.validation, state_dict["validation"], strict=True):
            loader.load_state_dict(state)

    @property
    def read_in_epoch(self) -> Sequence[ResumableLoader]:
        """Loaders whose batches an epoch reads, with a pass in progress at a snapshot."""
        return [self.training]

    def restored(self) -> None:
        """Call `restored` of every loader."""
        for loader in (self.training, *self.validation):
            loader.restored()

    def clone(self) -> "FitLoaders":
        """Return loaders that can load a state while these are read."""
        return FitLoaders(self.training.clone(), [loader.clone() for loader in self.validation], self.given)
