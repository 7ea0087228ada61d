"""Ranks on this machine, without an agent in between: the quickest way to a first step."""

import sys
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.session.session import Session

__all__ = ["Spawn"]


class Spawn(Launcher):
    """Starts one process that imports torch and forks the ranks: what takes seconds is done once for all of them."""

    name: ClassVar[str] = "spawn"

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command of the fork server."""
        module = "midstride.engine.launch.fork_server"
        return [sys.executable, "-m", module, str(session.folder), str(job.world.processes), str(grace_s)]
