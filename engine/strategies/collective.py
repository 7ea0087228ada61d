"""Exchanges between ranks other than gradients: Python values, on the host."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from midstride.engine.strategies.side_channel import SideChannel
from midstride.engine.world import World

__all__ = ["Collective", "SingleProcess"]


class Collective(ABC):
    """Connects the ranks of a world and exchanges values. Every rank makes the same calls, in the same order.

    The values are small: logged metrics, stop requests, positions of snapshots. Strategies exchange gradients.
    """

    @abstractmethod
    def init_process_group(self, world: World, device: torch.device) -> None:
        """Connect to the other ranks of `world`; `device` is that of this rank. Calling it again does nothing.

        Raises:
            WorldError: a rank could not be connected.
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
        """Return the `torch.distributed.Store` of the ranks under a new prefix; None if there is none."""
        return None

    def side_channel(self) -> SideChannel:
        """Return a channel for exchanges in a background thread while training runs."""
        return SideChannel(1)

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Limit waits for other ranks to `timeout_s` seconds in the block, where the backend supports it."""
        yield

    def is_peer_failure(self, error: Exception) -> bool:
        """Return whether `error` was raised because another rank did not answer, or ended."""
        return False


class SingleProcess(Collective):
    """A world of one rank."""

    def init_process_group(self, world: World, device: torch.device) -> None:
        """Do nothing: there are no other ranks."""

    def gather(self, value: object) -> list[Any]:
        """Return a list of `value` alone."""
        return [value]
