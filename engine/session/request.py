"""What a process is asked for from outside: a snapshot, or to stop."""

import time
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Request", "RequestKind"]


class RequestKind(IntEnum):
    """What was asked; the larger one wins."""

    SNAPSHOT = 1
    STOP = 2


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        kind: what is asked for.
        deadline: when it must be done, by `time.monotonic` of this process.
    """

    kind: RequestKind
    deadline: float = float("inf")

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()
