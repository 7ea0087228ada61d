"""How the ranks talk to each other beside training."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from midstride.engine.strategies.object_gather import gather_objects

__all__ = ["CHANNEL", "SideChannel"]

#: what its group is called
CHANNEL = "midstride channel"
#: as long as training's own collectives may take
TIMEOUT = timedelta(minutes=30)


class SideChannel:
    """Lets one background thread of every rank exchange values while training exchanges gradients.

    Collectives of one group must meet in the same order on every rank, and two threads promise no order: so this is a
    group of its own. A rank that dies closes its connections, and a wait for it here ends with an error.

    Args:
        size: ranks in the world; every one of them makes its channel at the same point.
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
        """Let go of the group; no rank may be waiting in it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
