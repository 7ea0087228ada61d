"""Requests by signal to one process, answered by all ranks at the same boundary.

SIGTERM   take a snapshot and stop, within the grace (and SIGINT, in a world that a launcher started)
SIGINT    in a script or notebook: take a snapshot and stop; the second one stops at once
SIGUSR1   take a snapshot and continue

The handler of a signal only notes it. The ranks then agree on the next boundary (the end of a batch) that all of them
can still reach. All ranks pass the same boundaries, but not at the same time: in a validation they can be far apart. A
rank with a request writes a proposal to the store in which the ranks met. A thread of every rank reads it, answers with
the first boundary that its rank can still reach, and makes the rank wait at its next one. The largest answer is the
agreed boundary. There is no deadlock: the answers come from threads, and a rank that waits at an earlier boundary
continues as soon as all have answered.

This costs a few small requests to the store per second, and nothing in a step. The same thread publishes the step of
its rank, for the message when the rank is lost.
"""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from types import FrameType
from typing import Any

from midstride.engine.errors import StopRequested, Superseded, UserError, WorldError
from midstride.engine.processes.signal_listener import listen, read_signals, stop_signal_since
from midstride.engine.session.crash import show_crashes
from midstride.engine.session.liveness import LastSeen
from midstride.engine.session.script_exit import exit_codes_of_errors
from midstride.engine.session.session import Session
from midstride.engine.world import World

__all__ = ["GRACE_S", "BoundaryAgreement", "Request", "RequestKind", "SignalRequests", "say_interrupted"]

listen()  # here, since a script imports this in the main thread, and can train in others

#: seconds between being asked to stop and being killed: an orchestrator kills at 30 s
GRACE_S = 20.0

_EXIT_S = 2.0  # of the grace that are left for processes to exit
_POLL_S = 0.1
_ANSWER_S = 5.0  # after which a rank that has not answered counts as dead


class RequestKind(IntEnum):
    """Kind of a request; the larger one wins."""

    SNAPSHOT = 1
    STOP = 2


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        kind: the requested action.
        deadline: when it must be done, by `time.monotonic` of this process.
    """

    kind: RequestKind
    deadline: float = float("inf")

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


class SignalRequests:
    """The requests to this process by signals, and at which boundary all ranks answer them."""

    #: environment variable by which a launcher tells its ranks how many seconds of grace they have
    VARIABLE = "MIDSTRIDE_GRACE_S"

    def __init__(self) -> None:
        self.grace_s = float(os.environ.get(self.VARIABLE, GRACE_S))
        self._deadline: float | None = None
        self._snapshots = self._answered = 0
        self._agreement: BoundaryAgreement | None = None
        self._hears_since: float | None = None  #: in a thread where Python handles no signals: when it began to listen

    @property
    def stop_requested(self) -> bool:
        """Whether this process was asked to stop."""
        self._hear()
        return self._deadline is not None

    @property
    def has_pending(self) -> bool:
        """Whether something was asked of this process that was not yet answered."""
        return self.stop_requested or self._snapshots != self._answered

    def stop(self) -> None:
        """Ask for a stop at the next boundary, as a signal does; there is no deadline."""
        if self._deadline is None:
            self._deadline = math.inf

    def take_pending(self) -> Request | None:
        """Return the request to this process; a request to stop stands until it is obeyed."""
        self._hear()
        if self._deadline is not None:
            return Request(RequestKind.STOP, self._deadline)
        # Counted, not cleared: a signal may come between two lines.
        snapshots = self._snapshots
        if snapshots == self._answered:
            return None
        self._answered = snapshots
        return Request(RequestKind.SNAPSHOT)

    def at_boundary(self) -> Request | None:
        """Return the request that all ranks answer at this boundary.

        Every rank calls this at the same boundaries.
        """
        if self._agreement is not None:
            return self._agreement.at_boundary()
        return self.take_pending()

    @contextmanager
    def listening(
        self, store: Any, world: World, seen: LastSeen | None = None, *, takes_snapshots: bool = False
    ) -> Iterator[None]:
        """Receive signals, and requests of other ranks, until the block ends.

        Args:
            store: torch's key-value store that all ranks share; None for a world of one.
            world: this process among the others.
            seen: publishes to the other ranks where this one is.
            takes_snapshots: whether a stop takes a snapshot; else Ctrl-C means now, as everywhere in Python.

        Raises:
            KeyboardInterrupt: Ctrl-C, for the second time or without snapshots.
            StopRequested: something went wrong in the block after this process was asked to stop: ranks that stop
                take each other down, and their store may be gone as well.
        """
        self._deadline, self._answered = None, self._snapshots
        show_crashes()
        before = self._listen(world, takes_snapshots)
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
            self._deadline = self._hears_since = None

    def _listen(self, world: World, takes_snapshots: bool) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            read_signals()  # Python handles them in the main thread only
            self._hears_since = time.monotonic()
            return {}
        handlers: dict[int, Any] = {signal.SIGTERM: self._stop, signal.SIGUSR1: self._snapshot}
        if Session.from_environment() is not None:
            handlers[signal.SIGINT] = self._stop
        elif takes_snapshots and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handlers[signal.SIGINT] = partial(self._interrupt, world, os.getpid())
        # None stands for a handler that is not Python's: it cannot be put back.
        return {number: signal.signal(number, handler) or signal.SIG_DFL for number, handler in handlers.items()}

    def _hear(self) -> None:
        """Note a signal to stop that came while this thread trains, if it is not the main one."""
        if self._hears_since is not None and (number := stop_signal_since(self._hears_since)):
            self._stop(number, None)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + max(0.0, self.grace_s - _EXIT_S)

    def _interrupt(self, world: World, process: int, number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a process that user code has forked
            raise KeyboardInterrupt
        if self._deadline is not None:
            with exit_codes_of_errors():  # it may come anywhere in a script
                raise KeyboardInterrupt
        self._deadline = math.inf  # no launcher kills this process after a grace
        if world.is_first:
            say_interrupted()

    def _snapshot(self, number: int, frame: FrameType | None) -> None:
        self._snapshots += 1


def say_interrupted() -> None:
    """Say at once that Ctrl-C was heard, since the current step can take a while.

    For handlers of signals.
    """
    os.write(2, b"\nCtrl-C: stopping after a snapshot; press it again to end at once\n")


class BoundaryAgreement:
    """The part of one rank in the agreements.

    Args:
        pending: returns whether this rank has a request.
        take: returns the request.
        store: torch's key-value store; it is used over connections of its own.
        world: this rank among the others.
        seen: publishes where this rank is; None if that is not wanted.
    """

    def __init__(
        self,
        pending: Callable[[], bool],
        take: Callable[[], Request | None],
        store: Any,
        world: World,
        seen: LastSeen | None,
    ) -> None:
        self._pending, self._take, self._seen, self._world = pending, take, seen, world
        self._store = store.clone()
        self._round = self._boundaries_passed = 0
        self._is_open, self._answered_at = False, 0.0
        self._agreed: tuple[int, Request | None] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(store.clone(),), name="midstride-agreement", daemon=True
        )
        self._thread.start()

    def at_boundary(self) -> Request | None:
        """Count one boundary; return the request that all ranks answer at it, if there is one."""
        self._boundaries_passed += 1
        if self._pending() and not self._is_open:
            self._store.set(f"proposal/{self._round}", "")
            self._answer(self._store, self._round, self._boundaries_passed)
        return self._request_if_due() if self._is_open else None

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        # A thread inside torch when the interpreter ends would abort it; one that asks a frozen store never ends.
        self._thread.join(_ANSWER_S)

    def _listen(self, store: Any) -> None:
        while not self._closed.wait(_POLL_S):
            number = self._round
            try:
                if self._seen is not None:
                    self._seen.publish(store)
                if not self._is_open and store.check([f"proposal/{number}"]):
                    self._answer(store, number, None)
            except RuntimeError:
                return  # the store's host is gone, and with it the world

    def _answer(self, store: Any, number: int, here: int | None) -> None:
        """Answer with the next boundary this rank can reach.

        `here`; if that is None, the one after the last passed.
        """
        with self._lock:
            if self._is_open or number != self._round:
                return  # the other thread was faster
            self._is_open = True  # first: from here on the main thread waits at its next boundary
            request = self._take()
            answer = {
                "boundary": self._boundaries_passed + 1 if here is None else here,
                "asked": request.kind if request else 0,
                "left_s": request.left_s if request else 0.0,
            }
            # Clocks of machines differ, and may be set: the ranks answer at the same time, and each counts from there.
            self._answered_at = time.monotonic()
            store.set(self._key(self._world.rank), json.dumps(answer))

    def _request_if_due(self) -> Request | None:
        if self._agreed is None:
            self._agreed = self._agree()
        boundary, request = self._agreed
        if self._boundaries_passed < boundary:
            return None
        with self._lock:
            self._agreed, self._round, self._is_open = None, self._round + 1, False
        return request

    def _agree(self) -> tuple[int, Request | None]:
        keys = [self._key(rank) for rank in range(self._world.size)]
        try:
            self._store.wait(keys, timedelta(seconds=_ANSWER_S))
        except RuntimeError as error:
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise WorldError(f"ranks {silent} did not answer within {_ANSWER_S:.0f} s: they are dead") from error
        answers = [json.loads(self._store.get(key)) for key in keys]
        boundary = max(answer["boundary"] for answer in answers)
        asked = max(answer["asked"] for answer in answers)
        left_s = min(answer["left_s"] for answer in answers if answer["asked"] == asked)
        return boundary, Request(RequestKind(asked), self._answered_at + left_s) if asked else None

    def _key(self, rank: int) -> str:
        return f"answer/{self._round}/{rank}"
