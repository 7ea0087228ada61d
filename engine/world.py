"""The world a process belongs to: read from the environment once, then handed on whole."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """Where this process stands among the processes that train together.

    Args:
        rank: this process, 0 <= rank < size.
        size: processes in the world.
        local_rank: this process on its node.
        local_size: processes on this node.
        node: this node, from 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks for all."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        """Return the world that a launcher described in `environment`; alone if none did.

        >>> World.from_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).node
        1
        """
        size = int(environment.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        rank = int(environment["RANK"])
        local_size = int(environment.get("LOCAL_WORLD_SIZE", str(size)))
        return cls(
            rank=rank,
            size=size,
            local_rank=int(environment.get("LOCAL_RANK", str(rank % local_size))),
            local_size=local_size,
            node=int(environment.get("GROUP_RANK", str(rank // local_size))),
        )
