"""Nodes that join: other machines, on each of which `midstride join` is started, by a person or a cluster."""

import sys
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.session.session import Session

__all__ = ["Join"]


class Join(Launcher):
    """Starts no rank: it holds the rendezvous, where nodes that were started elsewhere are told what to train."""

    name: ClassVar[str] = "join"

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command of the rendezvous."""
        return [sys.executable, "-m", "midstride.engine.launch.machines.server", str(session.folder), str(grace_s)]
