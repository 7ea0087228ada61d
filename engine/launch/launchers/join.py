"""Nodes that join: machines on which a person or a cluster starts `midstride join`."""

import sys
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.session.session import Session

__all__ = ["Join"]


class Join(Launcher):
    """Starts no rank: holds the rendezvous from which joining machines get the job."""

    name: ClassVar[str] = "join"

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command of the rendezvous."""
        return [sys.executable, "-m", "midstride.engine.launch.machines.server", str(session.folder), str(grace_s)]
