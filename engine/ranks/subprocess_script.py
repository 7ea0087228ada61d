"""The ranks of a plain script: the script runs again, once for each other rank, and this process is rank 0.

Each of them makes the same calls; they meet in the first.
"""

import atexit
import os
import subprocess
import sys
import time

from midstride.engine.errors import WorldError
from midstride.engine.processes.lifetime import PARENT, die_with_parent
from midstride.engine.processes.loopback import ADDRESS, interfaces
from midstride.engine.strategies.rendezvous import serve_store
from midstride.engine.strategies.torch_internals import TCPStore
from midstride.engine.world import World

__all__ = ["ended_early", "start_other_ranks", "tie_to_first_rank"]

#: at the end of the script, for ranks that still do what stands after its last call
_PATIENCE_S = 60.0
#: after an error in this process, for the others to say theirs
_LAST_WORDS_S = 5.0

_processes: dict[int, subprocess.Popen[bytes]] = {}
_stores: list[TCPStore] = []


def start_other_ranks(size: int, gpus: list[int]) -> None:
    """Run this script again for ranks 1 to `size` - 1, and become rank 0; the second time, do nothing.

    No other rank outlives this process. They are told which `gpus` were selected.
    """
    if _processes:
        if size != len(_processes) + 1:
            raise WorldError(
                f"a Trainer of {size} processes in a script whose ranks are started, {len(_processes) + 1} of them"
            )
        return
    store = serve_store()
    _stores.append(store)
    meeting = {
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        World.STARTED: ",".join(map(str, gpus)),
        **interfaces(),
    }
    command = [sys.executable, *sys.orig_argv[1:]]
    for rank in range(1, size):
        world = World(rank=rank, size=size, local_rank=rank, local_size=size)
        environment = {**os.environ, **meeting, **world.environment, PARENT: str(os.getpid())}
        _processes[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    os.environ.update({**meeting, **World(size=size, local_size=size).environment})
    atexit.register(_end)


def tie_to_first_rank() -> None:
    """In a rank that a script started: end when its rank 0 does, whatever ends it."""
    if parent := os.environ.pop(PARENT, None):
        die_with_parent(int(parent))


def ended_early() -> list[str]:
    """Return text on which other ranks have ended by an error."""
    codes = {rank: process.poll() for rank, process in _processes.items()}
    return [
        f"rank {rank} had ended with code {code}; what it said stands above" for rank, code in codes.items() if code
    ]


def _end() -> None:
    failed = getattr(sys, "last_value", None) is not None
    until = time.monotonic() + (_LAST_WORDS_S if failed else _PATIENCE_S)
    for rank, process in _processes.items():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            if not failed:
                print(
                    f"midstride: rank {rank} was still running {_PATIENCE_S:.0f} s after rank 0: ended", file=sys.stderr
                )
