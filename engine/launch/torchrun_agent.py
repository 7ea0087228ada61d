"""torchrun's agent for this machine alone: `... .torchrun_agent TORCHRUN-ARGUMENTS SESSION`. Its ranks end with it."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from uuid import uuid4

from midstride.engine.processes.lifetime import PARENT, children, signal_all
from midstride.engine.processes.loopback import ADDRESS
from midstride.engine.processes.preload import preload

__all__ = ["main"]

_RANK = "midstride.engine.launch.rank"


def _pass_on(number: int, frame: FrameType | None) -> None:
    signal_all(children(os.getpid()), signal.Signals(number))


def _rendezvous(session: Path) -> list[str]:
    """Return arguments for a rendezvous in a file of the session, which only this user can write.

    The agent unpickles the state of its rendezvous. At a port, any local user could give it another one.
    """
    file = ["--rdzv-backend=c10d", f"--rdzv-endpoint={session / 'agent-rendezvous'}", "--rdzv-conf=store_type=file"]
    return [*file, f"--rdzv-id={uuid4().hex}", f"--local-addr={ADDRESS}"]


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

    try:
        with ranks_forked(_RANK):
            torchrun([*_rendezvous(Path(sys.argv[-1])), *sys.argv[1:]])
    except (ChildFailedError, SignalException):
        sys.exit(1)  # why is in the ranks' outcomes; a traceback of the agent would only hide it


if __name__ == "__main__":
    main()
