"""Fork server of a job: imports torch once, and forks everything launched for the job."""

import os
from contextlib import AbstractContextManager

from midstride.engine.config.job import TrainingJob
from midstride.engine.jobs.operations import OPERATIONS
from midstride.engine.launch.launchers.build import build_launcher
from midstride.engine.processes.environment import cores, program_environment
from midstride.engine.processes.fork_server import forking

__all__ = ["job_fork_server"]


def job_fork_server(job: TrainingJob) -> AbstractContextManager[None]:
    """Return a block in which attempts and operations of `job` are forked from a fork server.

    It imports at once.

    Raises:
        EngineError: the job's launcher cannot be used.
    """
    launcher = build_launcher(job.world.launched_by, job.folder)
    operations = (address.partition(":")[0] for address in OPERATIONS.values())
    threads = max(1, cores() // job.world.processes)
    return forking(
        program_environment(os.environ, threads), "midstride.engine.jobs.operations", *launcher.modules, *operations
    )
