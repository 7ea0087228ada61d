"""torchrun of this machine, whose ranks end with it: `... .torchrun_agent ARGUMENTS`."""

import os
import signal
import sys
from types import FrameType

from midstride.engine.processes.forked_program import end_with
from midstride.engine.processes.lifetime import PARENT, children, signal_all
from midstride.engine.processes.preload import preload
from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.world import World

__all__ = ["main"]

_RANK = "midstride.engine.launch.rank"


def _pass_on(number: int, frame: FrameType | None) -> None:
    signal_all(children(os.getpid()), signal.Signals(number))


def main() -> None:
    """Run torchrun on the command line's arguments; end with 1 if the world did not end well."""
    # torchrun gives its ranks a session each, so its death by SIGKILL would go unnoticed by them.
    os.environ[PARENT] = str(os.getpid())
    signal.signal(signal.SIGUSR1, _pass_on)
    preload("torch.distributed.run")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from midstride.engine.launch.elastic_ranks import ranks_forked
    from midstride.engine.launch.elastic_rendezvous import OneMachine

    meeting = AnonymousFile()
    os.environ[World.MEETING] = meeting.path
    try:
        with ranks_forked(_RANK):
            torchrun([OneMachine().use(), *sys.argv[1:]])
    except (ChildFailedError, SignalException):
        sys.exit(1)  # why is in the ranks' outcomes; a traceback of the agent would only hide it


if __name__ == "__main__":
    end_with(main)
