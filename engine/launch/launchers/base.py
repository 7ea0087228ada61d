"""Launcher: the command that starts the ranks, and its environment."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.environment import cores, program_environment
from midstride.engine.session.session import Session

__all__ = ["RANK_MODULES", "Launcher"]

#: what ranks would import one by one; the first optimizer imports torch._dynamo, which takes seconds
RANK_MODULES = (
    "midstride.engine.jobs.build",
    "midstride.engine.training.trainer",
    "midstride.engine.strategies.ddp",
    "torch._dynamo",
)


class Launcher(ABC):
    """Launcher of the ranks of an attempt.

    It starts nothing itself: `launch` runs its command.
    """

    name: ClassVar[str]
    #: of ours that its command runs by `python -m`, and what those need: a fork server imports them beforehand
    modules: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return a command that runs `midstride.engine.launch.rank` for `session`, once per rank."""

    def environment(self, session: Session, job: TrainingJob, base: Mapping[str, str]) -> dict[str, str]:
        """Return the world's environment, made from `base`, the launcher's own."""
        # Threads are part of what decides the bits: never more than the cores, never left to chance.
        threads = max(1, cores() // job.world.processes)
        return {**program_environment(base, threads), Session.VARIABLE: str(session.folder)}
