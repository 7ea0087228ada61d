"""The other ranks of a plain script: the same script again, once per rank."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from midstride.engine.errors import WorldError
from midstride.engine.processes.child_processes import end_within
from midstride.engine.processes.lifetime import PARENT
from midstride.engine.processes.loopback import rank_environments
from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.world import World

__all__ = ["ended_early", "ranks_watched", "start_other_ranks"]

#: seconds that the other ranks have at the end of the script, for code after its last call of a Trainer
_PATIENCE_S = 60.0
#: seconds that the other ranks have after an error in one process, to print their own
_OTHERS_S = 5.0
#: seconds between two checks of the other ranks
_POLL_S = 0.5

_processes: dict[int, subprocess.Popen[bytes]] = {}
_meetings: list[AnonymousFile] = []


def start_other_ranks(size: int, gpus: list[int]) -> None:
    """Run this script again for ranks 1 to `size` - 1; this process becomes rank 0.

    Happens once per process.

    No other rank outlives this process.

    Args:
        size: ranks in the world.
        gpus: indices of the GPUs that were selected for all of them.

    Raises:
        WorldError: ranks were started before, and for a world of another size.
    """
    if _processes:
        if size != len(_processes) + 1:
            raise WorldError(
                f"a Trainer of {size} processes in a script that has started {len(_processes) + 1} ranks: use one "
                "number of devices in a script"
            )
        return
    meeting = AnonymousFile()
    _meetings.append(meeting)
    base = {**os.environ, World.STARTED: ",".join(map(str, gpus))}
    ours, *others = rank_environments(size, meeting.path, base=base)
    command = [sys.executable, *sys.orig_argv[1:]]
    for rank, environment in enumerate(others, 1):
        tied = {**environment, PARENT: str(os.getpid())}
        _processes[rank] = subprocess.Popen(command, env=tied, stdin=subprocess.DEVNULL)
    os.environ.update(ours)
    atexit.register(_end)


def ended_early() -> list[str]:
    """Return a line for each other rank that has ended with an error."""
    codes = {rank: process.poll() for rank, process in _processes.items()}
    ended = {
        rank: f"{code} ({signal.Signals(-code).name})" if code < 0 else code for rank, code in codes.items() if code
    }
    return [f"rank {rank} had ended with code {code}; see its output above" for rank, code in ended.items()]


@contextmanager
def ranks_watched(patience_s: float) -> Iterator[None]:
    """End this process if another rank dies and the block runs `patience_s` seconds longer.

    gloo raises as soon as the connection to a rank is lost; NCCL waits until its timeout.
    """
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(over, patience_s), name="midstride ranks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(over: threading.Event, patience_s: float) -> None:
    while not over.wait(_POLL_S):
        if lines := ended_early():
            if over.wait(min(_OTHERS_S, patience_s)):
                return
            message = f"midstride: {'; '.join(lines)}; rank 0 waits for it"
            print(f"{message} at most {patience_s:g} s (collective_timeout_s)", file=sys.stderr, flush=True)
            if not over.wait(patience_s):
                print(f"{message} no longer: start the same run again to resume", file=sys.stderr, flush=True)
                os._exit(1)
            return


def _end() -> None:
    failed = getattr(sys, "last_value", None) is not None
    until = time.monotonic() + (_OTHERS_S if failed else _PATIENCE_S)
    for rank, process in _processes.items():
        if not end_within(process, until - time.monotonic()) and not failed:
            print(f"midstride: rank {rank} was still running {_PATIENCE_S:.0f} s after rank 0: ended", file=sys.stderr)
