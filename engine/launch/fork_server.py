"""The fork server of a world on one machine: `python -m midstride.engine.launch.fork_server SESSION RANKS GRACE_S`.

It imports torch once, forks the ranks, and watches them: when one fails, the others are asked to stop. Nothing of
torch runs in the server itself, so there are no threads that a fork would lose.
"""

import gc
import os
import signal
import socket
import sys
import time
from importlib import import_module
from typing import NoReturn

from midstride.engine.errors import StopRequested
from midstride.engine.launch.rank import main as be_a_rank
from midstride.engine.processes.lifetime import PARENT, die_with_parent, signal_all
from midstride.engine.processes.loopback import ADDRESS, interfaces
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.session import Session

__all__ = ["ForkServer", "main"]

#: what ranks would import one by one; the first optimizer imports torch._dynamo, which takes seconds
_PRELOAD = ("midstride.engine.training.trainer", "midstride.engine.strategies.ddp", "torch._dynamo")

_STOPS = (signal.SIGTERM, signal.SIGINT)
_WAITED = {signal.SIGCHLD, signal.SIGUSR1, *_STOPS}


class ForkServer:
    """Forks the ranks of a world and waits for them.

    Args:
        session: of the world.
        ranks: how many.
        grace_s: seconds that ranks which were asked to stop have for it.
    """

    def __init__(self, session: Session, ranks: int, grace_s: float) -> None:
        self._session, self._size, self._grace_s = session, ranks, grace_s
        self._ranks: set[int] = set()
        self._deadline: float | None = None

    def run(self) -> int:
        """Return 0 if every rank ended well, else 1."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)  # they wait until there is a process to pass them on to
        for module in _PRELOAD:
            import_module(module)
        gc.freeze()  # a collection in a rank would touch, and so copy, every page of what stands here
        if set(_STOPS) & signal.sigpending():
            return self._stopped_early()
        port = _free_port()
        for rank in range(self._size):
            self._ranks.add(self._fork_rank(rank, port))
        failed = False
        while self._ranks:
            came = signal.sigtimedwait(_WAITED, 0.5)
            if came is not None and came.si_signo == signal.SIGUSR1:
                signal_all([*self._ranks], signal.SIGUSR1)
            failed |= self._reap()
            if failed or (came is not None and came.si_signo in _STOPS):
                self._ask_to_stop()
            if self._deadline is not None and time.monotonic() > self._deadline:
                signal_all([*self._ranks])
        return int(failed)

    def _stopped_early(self) -> int:
        for rank in range(self._size):
            outcome = Outcome.of(StopRequested("asked to stop before the ranks were started"), rank=rank)
            self._session.write_outcome(outcome)
        return 1

    def _ask_to_stop(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            signal_all([*self._ranks], signal.SIGTERM)

    def _reap(self) -> bool:
        """Collect the ranks that have ended; return whether one of them failed."""
        failed = False
        for pid in [*self._ranks]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ranks.remove(pid)
                failed |= status != 0
        return failed

    def _fork_rank(self, rank: int, port: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._size, "LOCAL_WORLD_SIZE": self._size}
        meeting = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": port, PARENT: parent, **interfaces()}
        os.environ.update({name: str(value) for name, value in {**place, **meeting}.items()})
        _run_rank(self._session)


def _run_rank(session: Session) -> NoReturn:
    """Be a rank, from here to the end of the process."""
    code = 1
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED)
        sys.argv = ["midstride-rank", str(session.folder)]
        be_a_rank()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what the server would do at its exit is not the rank's to do


def _free_port() -> int:
    """Return a free port; should it be taken before the ranks meet, the next attempt has another."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run the world that the command line names."""
    folder, ranks, grace_s = sys.argv[1:]
    if parent := os.environ.pop(PARENT, None):
        die_with_parent(int(parent))
    code = ForkServer(Session(folder), int(ranks), float(grace_s)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch down would take a second, and all has been said


if __name__ == "__main__":
    main()
