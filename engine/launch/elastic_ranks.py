"""Ranks of torch's elastic agent as its forks, so that torch is imported only once."""

import os
import sys
from contextlib import AbstractContextManager
from importlib import import_module

from midstride.engine.launch.launchers.base import RANK_MODULES
from midstride.engine.launch.torch_internals import end_ranks_within, ranks_started_by
from midstride.engine.processes.forked_program import ForkedProgram
from midstride.engine.processes.preload import preload
from midstride.engine.processes.proc_entry import show_command
from midstride.engine.ranks.gpus import fork_cannot_use_cuda
from midstride.engine.session.requests import SignalRequests

__all__ = ["ranks_forked"]


def ranks_forked(module: str) -> AbstractContextManager[None]:
    """Import `module`; return a context in which torch's agents fork the ranks that run it.

    If the session has a grace, agents wait that long for ranks they have asked to end. Where a fork could not use
    CUDA, for example because the agent has asked the driver for GPUs, ranks are started as new programs instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that torchrun asks in a way that does no harm
    preload(*RANK_MODULES, module)
    if grace_s := os.environ.get(SignalRequests.VARIABLE):
        end_ranks_within(float(grace_s))

    def start(command: tuple[str, ...], environment: dict[str, str]) -> ForkedProgram | None:
        is_ours = command[:4] == (sys.executable, "-u", "-m", module)  # not where torchrun binds it to a NUMA node
        if not is_ours or sys.platform != "linux" or fork_cannot_use_cuda():
            return None

        def main() -> None:
            sys.argv = [*command[3:]]
            show_command(command)
            import_module(module).main()

        return ForkedProgram(main, environment)

    return ranks_started_by(start)
