"""torchrun's agent for this machine alone, whose ranks end with it: `... .torchrun_agent TORCHRUN-ARGUMENTS`."""

import os
import signal
import sys
from types import FrameType
from uuid import uuid4

from midstride.engine.processes.lifetime import PARENT, children, signal_all
from midstride.engine.processes.loopback import ADDRESS
from midstride.engine.processes.preload import preload
from midstride.engine.strategies.rendezvous import serve_store

__all__ = ["main"]

_RANK = "midstride.engine.launch.rank"


def _pass_on(number: int, frame: FrameType | None) -> None:
    signal_all(children(os.getpid()), signal.Signals(number))


def _meeting_at(port: int) -> list[str]:
    """Return what has torchrun's agent meet in a store at `port` of this machine, and its ranks on the loopback."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESS}:{port}", "--rdzv-conf=is_host=0"]
    return [*rendezvous, f"--rdzv-id={uuid4().hex}", f"--local-addr={ADDRESS}"]


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

    store = serve_store()  # torchrun's own listens on every interface
    try:
        with ranks_forked(_RANK):
            torchrun([*_meeting_at(store.port), *sys.argv[1:]])
    except (ChildFailedError, SignalException):
        sys.exit(1)  # why is in the ranks' outcomes; a traceback of the agent would only hide it


if __name__ == "__main__":
    main()
