"""What ranks exchange beside gradients: values of any kind, on the host."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from midstride.engine.strategies.side_channel import SideChannel
from midstride.engine.world import World

__all__ = ["Collective", "SingleProcess"]


class Collective(ABC):
    """How the ranks of a world meet, and what they tell each other. Every rank makes the same calls, in the same order.

    What is exchanged is small: logged values, whether to stop, where a snapshot stands. Gradients are the strategy's.
    """

    @abstractmethod
    def init_process_group(self, world: World, device: torch.device) -> None:
        """Meet the other ranks of `world`; `device` is that of this rank. Calling it again does nothing.

        Raises:
            WorldError: they could not be met.
        """

    @abstractmethod
    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks, the same list on every rank."""

    def broadcast(self, value: object) -> Any:
        """Return rank 0's `value` on every rank."""
        return self.gather(value)[0]

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        return all(self.gather(value))

    def key_value_store(self) -> Any:
        """Return a new corner of the key-value store in which the ranks met (a `torch.distributed.Store`), or None."""
        return None

    def side_channel(self) -> SideChannel:
        """Return a way to exchange values from a thread beside training."""
        return SideChannel(1)

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Let ranks wait at most so long for one that does not answer, until the block ends; where that can be set."""
        yield

    def is_peer_failure(self, error: Exception) -> bool:
        """Return whether `error` says that another rank did not answer, or left."""
        return False


class SingleProcess(Collective):
    """A world of one rank."""

    def init_process_group(self, world: World, device: torch.device) -> None:
        """Do nothing: there are no other ranks."""

    def gather(self, value: object) -> list[Any]:
        """Return `value` alone."""
        return [value]
