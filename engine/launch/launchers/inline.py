"""One process, without anything in between."""

import sys
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launchers.base import RANK_MODULES, Launcher
from midstride.engine.session.session import Session

__all__ = ["Inline"]


class Inline(Launcher):
    """Starts a single rank in a separate process: its death does not end the watcher."""

    name: ClassVar[str] = "inline"
    modules: ClassVar[tuple[str, ...]] = ("midstride.engine.launch.rank", *RANK_MODULES)

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command of the only rank."""
        return [sys.executable, "-m", "midstride.engine.launch.rank", str(session.folder)]
