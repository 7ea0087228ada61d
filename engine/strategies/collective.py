"""Exchanges between ranks other than gradients: Python values, on the host."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from midstride.engine.strategies.torch_internals import groups
from midstride.engine.world import World

__all__ = ["CHANNEL", "TIMEOUT", "Collective", "SideChannel", "SingleProcess", "gather_objects"]


class Collective(ABC):
    """Connects ranks and exchanges values. All ranks make the same calls in the same order.

    The values are small: logged metrics, stop requests, positions of snapshots. Strategies exchange gradients.
    """

    @abstractmethod
    def init_process_group(self, world: World, device: torch.device) -> None:
        """Connect to the other ranks of `world`. A second call does nothing.

        `device` is this rank's device.

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
        """Return an empty `torch.distributed.Store` of the ranks; None if there is none."""
        return None

    def side_channel(self) -> "SideChannel":
        """Return a channel for exchanges in a background thread while training runs."""
        return SideChannel(1)

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Limit waits for other ranks to `timeout_s` in the block, if the backend supports it."""
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


#: description of its process group
CHANNEL = "midstride channel"
#: long, because a rank can still import modules or read its first batch while the others wait
TIMEOUT = timedelta(minutes=30)


class SideChannel:
    """Lets a background thread of each rank exchange values while training exchanges gradients.

    All ranks must call collectives of a group in the same order, which two threads cannot guarantee, so the channel has
    its own group. A dead rank's connections are closed, and waits for it end with an error.

    Args:
        size: number of ranks; every rank makes its channel at the same point.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc=CHANNEL) if size > 1 else None

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        if self._group is None:
            return [value]
        return gather_objects(value, self._size, self._group)

    def close(self) -> None:
        """Destroy the group, when no rank waits in it, unless the program has destroyed all groups."""
        if self._group in groups():
            dist.destroy_process_group(self._group)
        self._group = None


#: bytes of a value that are sent with its length in the first exchange
SHORT_BYTES = 4096 - 8


def gather_objects(value: object, size: int, group: Any = None) -> list[Any]:
    """Return each rank's `value` in order of ranks, in two exchanges like `all_gather_object`.

    Args:
        value: picklable.
        size: number of ranks in the group.
        group: process group; None for the default group.
    """
    data = pickle.dumps(value)
    heads = _gather_bytes(len(data).to_bytes(8, "little") + data[:SHORT_BYTES], 8 + SHORT_BYTES, size, group)
    lengths = [int.from_bytes(head[:8], "little") for head in heads]
    long_bytes = max(lengths) - SHORT_BYTES
    tails = _gather_bytes(data[SHORT_BYTES:], long_bytes, size, group) if long_bytes > 0 else repeat(b"")
    return [pickle.loads((head[8:] + tail)[:length]) for head, tail, length in zip(heads, tails, lengths, strict=False)]


def _gather_bytes(data: bytes, length: int, size: int, group: Any) -> list[bytes]:
    """Return every rank's `data`, padded to `length` bytes."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"  # a group of the user's own may have NCCL alone
    mine = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8).to(device)
    everyones = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyones, mine, group=group)
    return [one.cpu().numpy().tobytes() for one in everyones]
