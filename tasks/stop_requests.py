"""Requests to stop that reach tasks in any thread: signals, Cancel and Pause."""

import signal
import threading
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
from midstride.engine.processes.signal_listener import listen, read_signals, stop_signal_since
from midstride.tasks.prefect_internals import outer_flow

__all__ = ["is_paused", "stop_delayed", "stop_if_asked"]

# Here, since a flow's module is imported in the main thread, and trainings can start in others.
listen()
read_signals()


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
