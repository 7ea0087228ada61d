"""A launcher as an author writes one."""

from midstride.engine import TrainingJob
from midstride.engine.launch.launchers.spawn import Spawn
from midstride.engine.session.session import Session


class Nice(Spawn):
    """Starts a world that leaves the processor to others."""

    name = "nice"

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        return ["nice", "-n", "5", *super().command(session, job, grace_s=grace_s)]
