"""horovodrun, on this machine and over ssh on others."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.errors import StrategyUnavailable
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.processes.loopback import interfaces
from midstride.engine.processes.registered_ranks import RegisteredRanks
from midstride.engine.session.session import Session

__all__ = ["Horovodrun"]

#: seconds in which all ranks must have started, and then met; imports take long on a busy machine
_START_S = 300
_MEET_S = 120


class Horovodrun(Launcher):
    """Starts the ranks under horovodrun, over gloo, without its slow search for controllers.

    The supervisor looks after the ranks itself: `midstride.engine.processes.registered_ranks` says why.
    """

    name: ClassVar[str] = "horovodrun"

    def __init__(self) -> None:
        if find_spec("horovod") is None:
            raise StrategyUnavailable(f"horovodrun is not installed here: {STRATEGIES['horovod'].remedy}")

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        """Return the command of horovodrun."""
        world, loopback = job.world, interfaces({}).get("GLOO_SOCKET_IFNAME")
        return [
            *(sys.executable, "-m", "midstride.engine.launch.horovodrun_agent", "--gloo", "--disable-cache"),
            *(("--network-interfaces", loopback) if loopback and not world.hosts else ()),
            *("--start-timeout", str(_START_S), "-np", str(world.processes)),
            *("-H", world.hosts or f"localhost:{world.processes}"),
            *(sys.executable, "-m", "midstride.engine.launch.horovod_rank", str(session.folder)),
        ]

    def environment(self, session: Session, job: TrainingJob, base: Mapping[str, str]) -> dict[str, str]:
        """Return the world's environment."""
        return {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_MEET_S),
            # Rank 0 keeps what the ranks agree in; if it dies, the others' polls for it need no C++ stacks in the log.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **super().environment(session, job, base),
            **({} if job.world.hosts else interfaces(base)),
            RegisteredRanks.VARIABLE: "here" if job.world.hosts else "all",
        }
