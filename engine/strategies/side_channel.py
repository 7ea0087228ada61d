"""Exchanges between ranks in a background thread, while training runs."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from midstride.engine.strategies.object_gather import gather_objects

__all__ = ["CHANNEL", "TIMEOUT", "SideChannel"]

#: description of its process group
CHANNEL = "midstride channel"
#: long, because a rank may still import modules or read its first batch while the others wait
TIMEOUT = timedelta(minutes=30)


class SideChannel:
    """Lets one background thread of every rank exchange values while training exchanges gradients.

    All ranks must call collectives of a group in the same order, which two threads cannot guarantee: so this has a
    group of its own. A rank that dies closes its connections, and waits for it end with an error.

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
        """Destroy the group; no rank may be waiting in it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
