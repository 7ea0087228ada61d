"""The fork server of a command that trains, started before the command line itself is imported: torch takes longer."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from midstride.engine.processes.environment import program_environment
from midstride.engine.processes.fork_server import forking

__all__ = ["MODULES", "early_imports"]

#: what `job_fork_server` asks for with any launcher of ours; to ask them would be to import them
MODULES = (
    "midstride.engine.jobs.build",
    "midstride.engine.jobs.evaluate",
    "midstride.engine.jobs.operations",
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
    """Return a block in which a command that trains has its fork server, before it has read its job.

    Args:
        arguments: of the command line.
    """
    if not _COMMANDS & {*arguments[:1]} or "--help" in arguments:
        return nullcontext()
    return forking(program_environment(os.environ, 1), *MODULES)  # a fork has the threads that it asks for
