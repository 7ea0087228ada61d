"""Schedulers by name: nothing is imported until its name is asked for."""

from midstride.engine.config.import_paths import load_attribute
from midstride.engine.config.schedulers import SCHEDULERS
from midstride.engine.launch.schedulers.base import NodeRequest, Scheduler
from midstride.engine.runs.run import Run

__all__ = ["build_scheduler"]


def build_scheduler(run: Run, grace_s: float) -> Scheduler | None:
    """Return the scheduler that the job names; None if its nodes come by themselves.

    Args:
        run: what is trained.
        grace_s: seconds that a node has to take a snapshot and leave.

    Raises:
        StrategyUnavailable: what it needs is not installed.
    """
    world = run.job.world
    if world.on not in SCHEDULERS:
        return None
    kind = load_attribute(SCHEDULERS[world.on].target, run.job.folder, "world.on")
    scheduler: Scheduler = kind(NodeRequest(run.name, run.url, world.machines, world.on_args, grace_s))
    return scheduler
