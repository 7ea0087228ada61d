"""Requests from outside: a signal to one process becomes something that every rank does at the same boundary.

SIGTERM   take a snapshot and stop, within the grace (and SIGINT, in a world that a launcher started)
SIGUSR1   take a snapshot and go on

The handler of a signal only notes it. The request is answered at the next boundary (the end of a batch) that all ranks
can still reach, which `agreement.py` finds.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from midstride.engine.errors import StopRequested, Superseded, UserError
from midstride.engine.session.agreement import BoundaryAgreement
from midstride.engine.session.liveness import LastSeen
from midstride.engine.session.request import Request, RequestKind
from midstride.engine.session.session import Session
from midstride.engine.world import World

__all__ = ["GRACE_S", "SignalRequests"]

#: seconds between being asked to stop and being killed: an orchestrator kills at 30 s
GRACE_S = 20.0

_EXIT_S = 2.0  # of the grace that are left for processes to exit


class SignalRequests:
    """The requests to this process by signals, and at which boundary all ranks answer them."""

    #: environment variable by which a launcher tells its ranks how many seconds of grace they have
    VARIABLE = "MIDSTRIDE_GRACE_S"

    def __init__(self) -> None:
        self.grace_s = float(os.environ.get(self.VARIABLE, GRACE_S))
        self._deadline: float | None = None
        self._snapshots = self._answered = 0
        self._agreement: BoundaryAgreement | None = None

    @property
    def stop_requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._deadline is not None

    @property
    def has_pending(self) -> bool:
        """Whether something was asked of this process that was not yet answered."""
        return self._deadline is not None or self._snapshots != self._answered

    def take_pending(self) -> Request | None:
        """Return what was asked of this process; a request to stop stands until it is obeyed."""
        if self._deadline is not None:
            return Request(RequestKind.STOP, self._deadline)
        # Counted, not cleared: a signal may come between two lines.
        snapshots = self._snapshots
        if snapshots == self._answered:
            return None
        self._answered = snapshots
        return Request(RequestKind.SNAPSHOT)

    def at_boundary(self) -> Request | None:
        """Return the request that all ranks answer at this boundary; every rank calls this at the same boundaries."""
        if self._agreement is not None:
            return self._agreement.at_boundary()
        return self.take_pending()

    @contextmanager
    def listening(self, store: Any, world: World, seen: LastSeen | None = None) -> Iterator[None]:
        """Hear signals, and what is asked of other ranks, until the block ends.

        Args:
            store: torch's key-value store that all ranks share; None for a world of one.
            world: this process among the others.
            seen: publishes to the other ranks where this one is.

        Raises:
            StopRequested: something went wrong in the block after this process was asked to stop: ranks that stop
                take each other down, and their store may be gone as well.
        """
        self._deadline, self._answered = None, self._snapshots
        before = self._listen()
        if store is not None and world.size > 1:
            self._agreement = BoundaryAgreement(lambda: self.has_pending, self.take_pending, store, world, seen)
        try:
            yield
        except (UserError, StopRequested, Superseded):
            raise
        except Exception as error:
            if not self.stop_requested:
                raise
            raise StopRequested(
                f"asked to stop; before a snapshot was taken for that: {type(error).__name__}: {error}\n"
                "The run resumes from its last committed snapshot."
            ) from error
        finally:
            if self._agreement is not None:
                self._agreement.close()
                self._agreement = None
            # An agent may pass on a second time what has been obeyed.
            obeyed = self.stop_requested and Session.from_environment() is not None
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if obeyed else handler)
            self._deadline = None

    def _listen(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}  # Python hears signals in the main thread only
        handlers: dict[int, Any] = {signal.SIGTERM: self._stop, signal.SIGUSR1: self._snapshot}
        if Session.from_environment() is not None:  # else Ctrl-C means now, as everywhere in Python
            handlers[signal.SIGINT] = self._stop
        # None stands for a handler that is not Python's: it cannot be put back.
        return {number: signal.signal(number, handler) or signal.SIG_DFL for number, handler in handlers.items()}

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + max(0.0, self.grace_s - _EXIT_S)

    def _snapshot(self, number: int, frame: FrameType | None) -> None:
        self._snapshots += 1
