"""What a launcher is: the command that starts a world, and what its environment needs."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.session.session import Session

__all__ = ["Launcher", "cores"]


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Launcher(ABC):
    """Who starts the processes of a world. It starts nothing itself: `launch` runs its command."""

    name: ClassVar[str]

    @abstractmethod
    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command whose processes run `midstride.engine.launch.rank` for `session`, one per rank."""

    def environment(self, session: Session, job: TrainingJob, base: Mapping[str, str]) -> dict[str, str]:
        """Return the world's environment, made from `base`, the launcher's own."""
        # Threads are part of what decides the bits: never more than the cores, never left to chance.
        threads = str(max(1, cores() // job.world.processes))
        # So is the order of a set of text, which is another in each interpreter unless this is fixed.
        fixed = {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": "0"}
        return {**fixed, **base, "PYTHONUNBUFFERED": "1", Session.VARIABLE: str(session.folder)}
