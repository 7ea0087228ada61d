"""Starts the fork server of a training command before the slow import of the command line."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from midstride.engine.processes.environment import program_environment
from midstride.engine.processes.fork_server import forking

__all__ = ["MODULES", "early_imports"]

#: the modules that `job_fork_server` preloads with the built-in launchers, as a copy: to ask them would import them
MODULES = (
    "midstride.engine.jobs.build",
    "midstride.engine.jobs.evaluate",
    "midstride.engine.jobs.export_weights",
    "midstride.engine.jobs.operations",
    "midstride.engine.jobs.predict",
    "midstride.engine.jobs.prepare",
    "midstride.engine.jobs.publish",
    "midstride.engine.launch.rank",
    "midstride.engine.launch.spawn_agent",
    "midstride.engine.launch.torchrun_agent",
    "midstride.engine.strategies.ddp",
    "midstride.engine.training.trainer",
    "torch._dynamo",
    "torch.distributed.run",
)
_COMMANDS = {"fit", "nightly", "train"}


def early_imports(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context in which a fork server preloads torch, if the command trains.

    The job has not been read yet.

    Args:
        arguments: of the command line.
    """
    if not _COMMANDS & {*arguments[:1]} or "--help" in arguments:
        return nullcontext()
    return forking(program_environment(os.environ, 1), *MODULES)  # a fork has the threads that it asks for
