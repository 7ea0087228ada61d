"""Requests to stop that reach tasks in any thread: signals, Cancel and Pause."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from time import monotonic
from types import FrameType
from typing import Any

from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal

from midstride.engine.errors import StopRequested
from midstride.engine.processes.signal_handlers import signal_handlers
from midstride.tasks.prefect_internals import outer_flow

__all__ = ["is_paused", "listen", "stop_delayed", "stop_if_asked", "stop_signal_since"]


_STOPS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def listen() -> bool:
    """Listen to signals from now on. Return True if so.

    Only the main thread can start it.

    Call it as early as possible: signals before the first call are unknown.
    """
    global _listener
    if threading.current_thread() is threading.main_thread():
        _listener = _listener or _SignalListener()
        _listener.listen()
    return _listener is not None


def stop_signal_since(start: float) -> signal.Signals | None:
    """Return the newest signal since `start` that asked this process to stop; None without one.

    Signals without a handler in Python end the process by themselves.

    Args:
        start: in seconds, as `time.monotonic()` counts.
    """
    if _listener is None or (newest := _listener.newest) is None:
        return None
    number, at = newest
    return number if at >= start else None


class _SignalListener:
    """Reads the numbers of signals, and passes them to the previous listener, such as a loop."""

    def __init__(self) -> None:
        self.newest: tuple[signal.Signals, float] | None = None
        self._numbers, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._others = -1
        threading.Thread(target=self._read, name="midstride signals", daemon=True).start()

    def listen(self) -> None:
        """Receive the numbers: an event loop may have taken that place since."""
        others = signal.set_wakeup_fd(self._wakeup)
        if others != self._wakeup:
            self._others = others

    def _read(self) -> None:
        while numbers := os.read(self._numbers, 64):
            for number in numbers:
                if number in _STOPS:
                    self.newest = signal.Signals(number), time.monotonic()
            if self._others >= 0:
                try:
                    os.write(self._others, numbers)
                except OSError:  # it is closed, or full: then it is being told already
                    continue


def _forget() -> None:
    """Leave the pipe to the parent after a fork: a signal to the child is none to the parent."""
    global _listener
    if _listener is not None:
        signal.set_wakeup_fd(-1)
        _listener = None


_listener: _SignalListener | None = None
os.register_at_fork(after_in_child=_forget)


listen()  # here, since a flow's module is imported in the main thread, and trainings can start in others


def stop_if_asked() -> None:
    """Raise after a request to stop this flow run. Waiting tasks call it several times a second.

    In the main thread, handlers of signals raise by themselves. Other threads raise the same here, so Prefect gives
    their flows and tasks the same states: Cancelled after a Cancel, else Crashed.

    Raises:
        TerminationSignal: the process got SIGTERM, as by Cancel.
        KeyboardInterrupt: the process got SIGINT.
        StopRequested: the flow run is paused.
    """
    if is_paused():
        raise StopRequested("the flow run was paused; Resume continues from the last snapshot")
    if threading.current_thread() is threading.main_thread():
        return
    if number := stop_signal_since(_outermost_start()):
        raise KeyboardInterrupt if number == signal.SIGINT else TerminationSignal(signal=number)


def is_paused() -> bool:
    """Whether someone pressed Pause for this flow run, or one that contains it."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run_suspension_request.is_requested()


@contextmanager
def stop_delayed() -> Iterator[None]:
    """Delay a request to stop until the block ends. Obey a second one at once. Main thread only.

    Prefect's client turns an exception that the handler of a signal raises in it into another one, and the request
    would be lost.
    """
    pending: list[int] = []
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(handler := signal.getsignal(asked)):
            before[asked] = handler

    def hold(number: int, frame: FrameType | None) -> None:
        if pending:
            before[number](number, frame)
        pending.append(number)

    with signal_handlers(dict.fromkeys(before, hold)):
        yield
    if pending:
        before[pending[0]](pending[0], None)


def _outermost_start() -> float:
    """Return the start of this thread's outermost flow run. Earlier requests are not for it."""
    context = outer = FlowRunContext.get()
    while outer is not None:
        context, outer = outer, outer_flow(outer)
    started = datetime.now(UTC) if context is None else context.start_time
    return monotonic() - (datetime.now(UTC) - started).total_seconds()
