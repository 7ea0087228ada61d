"""torchrun's agent, started so that its ranks can be tied to its life: `... .agent TORCHRUN-ARGUMENTS`."""

import os
import signal
import sys
from types import FrameType

from midstride.engine.launchers.lifeline import PARENT, children, kill_all

__all__ = ["main"]


def _pass_on(number: int, frame: FrameType | None) -> None:
    kill_all(children(os.getpid()), signal.Signals(number))


def main() -> None:
    """Run torchrun on the command line's arguments; end with 1 if the world did not end well."""
    # torchrun gives its ranks a session each, so its death by SIGKILL would go unnoticed by them.
    os.environ[PARENT] = str(os.getpid())
    signal.signal(signal.SIGUSR1, _pass_on)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except (ChildFailedError, SignalException):
        sys.exit(1)  # why is in the ranks' outcomes; a traceback of the agent would only hide it


if __name__ == "__main__":
    main()
