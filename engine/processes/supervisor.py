"""Supervisor of a world.

Run as `python -m midstride.engine.processes.supervisor PARENT GRACE_S COMMAND...`.

A small process between the launcher and the world, for the one case in which the launcher cannot
clean up: when it is killed. The supervisor is told by the kernel, asks the world to stop, gives it its
grace, and then ends every process below it. It does the same when it is asked to stop itself. SIGUSR1, which asks for
a snapshot, it passes on.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from midstride.engine.processes.lifetime import PARENT, become_subreaper, descendants, die_with_parent, signal_all
from midstride.engine.processes.registered_ranks import RegisteredRanks

__all__ = ["Supervisor", "main"]

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WAITED = {signal.SIGCHLD, signal.SIGUSR1, *_STOPS}
_LEFTOVERS_S = 1.0  # for what the world's first process left behind


class Supervisor:
    """Runs one command, and leaves nothing of it alive.

    Args:
        command: the world's first process.
        grace_s: seconds between asking the world to stop and making it stop.
    """

    def __init__(self, command: Sequence[str], grace_s: float) -> None:
        self.command = list(command)
        self.grace_s = grace_s
        self._deadline: float | None = None

    def run(self) -> int:
        """Run the command to its end; return its exit code (128 + n if signal n ended it)."""
        # Blocked signals wait for `sigtimedwait`: no handler, and no moment at which one is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
        become_subreaper()
        child, ranks = self._start(), RegisteredRanks.from_environment()
        code = None
        while code is None:
            came = signal.sigtimedwait(_WAITED, 0.5)
            if came is not None and came.si_signo in _STOPS and self._deadline is None:
                self._deadline = time.monotonic() + self.grace_s
                signal_all((ranks and ranks.running()) or [child], signal.SIGTERM)
            if came is not None and came.si_signo == signal.SIGUSR1:
                signal_all((ranks and ranks.running()) or [child], signal.SIGUSR1)
            if ranks is not None:
                ranks.end_leftovers(child)
            if self._deadline is not None and time.monotonic() > self._deadline:
                signal_all(descendants(os.getpid()))
            code = self._reap(child)
        self._end_leftovers()
        return code

    def _start(self) -> int:
        supervisor = os.getpid()
        child = os.fork()
        if child:
            return child
        try:
            die_with_parent(supervisor)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED)
            for stop in _STOPS:  # a shell that started us in the background had SIGINT ignored
                signal.signal(stop, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a rank to take a snapshot
            os.environ[PARENT] = str(supervisor)
            self.execute()
        except BaseException as error:
            print(f"cannot run {self.command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)

    def execute(self) -> None:
        """Become the command; called in the process that was forked for it."""
        os.execvp(self.command[0], self.command)

    def _reap(self, child: int) -> int | None:
        """Collect all dead children, adopted ones too. Return the exit code of `child`, if it died."""
        code = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if pid == 0:
                return code
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                code = 128 - code if code < 0 else code

    def _end_leftovers(self) -> None:
        """End the processes left by the world's first one: by SIGTERM, then by SIGKILL."""
        patience = 0.0 if self._deadline is not None else _LEFTOVERS_S
        polite_until = time.monotonic() + patience
        signal_all(descendants(os.getpid()), signal.SIGTERM)
        while left := descendants(os.getpid()):
            if time.monotonic() >= polite_until:
                signal_all(left)
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            self._reap(-1)


def main() -> None:
    """Supervise the world that the command line names."""
    parent, grace_s, *command = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGTERM)
    sys.exit(Supervisor(command, float(grace_s)).run())


if __name__ == "__main__":
    main()
