"""Ranks on this machine, without an agent in between: the quickest way to a first step."""

import sys
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launchers.base import RANK_MODULES, Launcher
from midstride.engine.session.session import Session

__all__ = ["Spawn"]


class Spawn(Launcher):
    """Starts one process that imports torch once and forks the ranks."""

    name: ClassVar[str] = "spawn"
    modules: ClassVar[tuple[str, ...]] = ("midstride.engine.launch.spawn_agent", *RANK_MODULES)

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command of the agent."""
        module = "midstride.engine.launch.spawn_agent"
        return [sys.executable, "-m", module, str(session.folder), str(job.world.processes), str(grace_s)]
