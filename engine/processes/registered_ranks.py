"""Ranks known by their heartbeats, which a supervisor stops if their launcher cannot."""

import os
import signal
import sys
import time
from pathlib import Path

from midstride.engine.processes.lifetime import SESSION, descendants, signal_all

__all__ = ["RegisteredRanks"]

_LEFTOVERS_S = 1.0  # that children of a dead rank have to end by themselves
_HANGS_S = 60.0  # after the end of all ranks, after which their launcher counts as hung


class RegisteredRanks:
    """The ranks on this machine, by their heartbeats.

    horovodrun kills its ranks five seconds after it was asked to stop, so they are asked directly. It waits for
    every process that holds the output of one of its ranks, a dead rank's children too, before it tells the other
    ranks. And once in a while it does not end.

    Args:
        folder: of the session.
        all_here: whether all ranks are on this machine; then a rank that is no descendant of this process has ended.
    """

    #: environment variable of a world whose ranks are looked after so: those that are "here", or "all" as all are here
    VARIABLE = "MIDSTRIDE_ASKS_RANKS"

    def __init__(self, folder: Path, *, all_here: bool) -> None:
        self._folder, self._all_here = folder, all_here
        self._seen: set[int] = set()
        self._since: dict[str, float] = {}

    @classmethod
    def from_environment(cls) -> "RegisteredRanks | None":
        """Return the ranks of the supervised world, if the environment asks for them."""
        if (where := os.environ.get(cls.VARIABLE)) is None:
            return None
        return cls(Path(os.environ[SESSION]), all_here=where == "all")

    def running(self) -> list[int]:
        """Return the ranks below this process. The process ids of another machine mean nothing here."""
        return sorted(self._registered() & set(descendants(os.getpid())))

    def end_leftovers(self, launcher: int) -> None:
        """End children that dead ranks left behind, and a launcher that runs on without ranks."""
        below = descendants(os.getpid())
        said = self._registered()
        self._seen |= said if self._all_here else said & set(below)  # a rank may end before it was ever looked for
        dead = self._seen - set(below)
        if self._seconds("left behind", bool(dead)) > _LEFTOVERS_S:
            # A process whose parents have died is ours now, and no longer below the launcher.
            signal_all(sorted(set(below) - {launcher, *descendants(launcher)}))
        if self._seconds("hangs", bool(dead) and dead == self._seen) > _HANGS_S:
            signal_all([launcher], signal.SIGKILL)

    def _seconds(self, what: str, is_so: bool) -> float:
        """Return for how many seconds `what` has been so."""
        if not is_so:
            self._since.pop(what, None)
            return 0.0
        return time.monotonic() - self._since.setdefault(what, time.monotonic())

    def _registered(self) -> set[int]:
        return {_process(path) for path in self._folder.glob("heartbeat-rank-*")} - {0}


def _process(heartbeat: Path) -> int:
    """The process id, with which a heartbeat begins; 0 in one that is being made or has gone."""
    try:
        return int.from_bytes(heartbeat.read_bytes()[:8], sys.byteorder)
    except OSError:
        return 0
