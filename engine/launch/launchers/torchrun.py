"""torchrun on this node."""

import sys
from collections.abc import Mapping
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launchers.base import RANK_MODULES, Launcher
from midstride.engine.processes.loopback import interfaces
from midstride.engine.session.session import Session

__all__ = ["Torchrun"]


class Torchrun(Launcher):
    """Starts one process per rank under torch's elastic agent, without its restarts."""

    name: ClassVar[str] = "torchrun"
    modules: ClassVar[tuple[str, ...]] = (
        "midstride.engine.launch.torchrun_agent",
        "torch.distributed.run",
        *RANK_MODULES,
    )

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command of the agent."""
        return [
            *(sys.executable, "-m", "midstride.engine.launch.torchrun_agent"),
            f"--nproc-per-node={job.world.processes}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
            *("--log-dir", str(session.folder / "agent")),
            *("--module", "midstride.engine.launch.rank", str(session.folder)),
        ]

    def environment(self, session: Session, job: TrainingJob, base: Mapping[str, str]) -> dict[str, str]:
        """Return the world's environment."""
        return {**super().environment(session, job, base), **interfaces(base)}
