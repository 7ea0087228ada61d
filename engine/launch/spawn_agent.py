"""Agent of one machine: `... engine.launch.spawn_agent SESSION RANKS GRACE_S`.

It imports torch once, forks the ranks, holds the file in which they meet, and watches them: when one fails, the others
are asked to stop. Nothing of torch runs in the agent before the ranks are forked: a fork would lose its threads.
"""

import os
import signal
import sys
import time

from midstride.engine.errors import StopRequested
from midstride.engine.launch.launchers.base import RANK_MODULES
from midstride.engine.launch.rank import main as rank_main
from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.processes.lifetime import tie_to_parent
from midstride.engine.processes.loopback import rank_environments
from midstride.engine.processes.preload import preload
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.session.session import Session

__all__ = ["SpawnAgent", "main"]

_STOPS = (signal.SIGTERM, signal.SIGINT)
_WAITED = {signal.SIGCHLD, signal.SIGUSR1, *_STOPS}


class SpawnAgent:
    """Forks the ranks of a world and waits for them.

    Args:
        session: of the world.
        ranks: how many.
        grace_s: seconds that ranks which were asked to stop have for it.
    """

    def __init__(self, session: Session, ranks: int, grace_s: float) -> None:
        self._session, self._size, self._grace_s = session, ranks, grace_s
        self._deadline = float("inf")

    def run(self) -> int:
        """Return 0 if every rank ended well, else 1."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)  # they wait until there is a process to pass them on to
        preload(*RANK_MODULES)
        if set(_STOPS) & signal.sigpending():
            return self._stopped_early()
        meeting = AnonymousFile()  # held until the ranks have ended
        environments = rank_environments(self._size, meeting.path)
        with ChildProcesses(_run_rank, [self._session], environments) as ranks:
            return self._watch(ranks)

    def _watch(self, ranks: ChildProcesses) -> int:
        while ranks.running() and time.monotonic() <= self._deadline:
            came = signal.sigtimedwait(_WAITED, 0.5)
            if came is not None and came.si_signo == signal.SIGUSR1:
                ranks.send(signal.SIGUSR1)
            if any(ranks.exit_codes()) or (came is not None and came.si_signo in _STOPS):
                self._ask_to_stop(ranks)
        return int(any(code != 0 for code in ranks.exit_codes()))

    def _stopped_early(self) -> int:
        for rank in range(self._size):
            outcome = Outcome.of(StopRequested("asked to stop before the ranks were started"), rank=rank)
            self._session.write_outcome(outcome)
        return 1

    def _ask_to_stop(self, ranks: ChildProcesses) -> None:
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._grace_s
            ranks.send(signal.SIGTERM)


def _run_rank(session: Session) -> None:
    """Run a rank, from here to the end of the process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED)
    sys.argv = ["midstride-rank", str(session.folder)]
    rank_main()


def main() -> None:
    """Run the world that the command line names."""
    folder, ranks, grace_s = sys.argv[1:]
    tie_to_parent()
    code = SpawnAgent(Session(folder), int(ranks), float(grace_s)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch down would take a second, and all has been said


if __name__ == "__main__":
    main()
