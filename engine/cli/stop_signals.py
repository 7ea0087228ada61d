"""Signals that ask a command to stop, as exceptions."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from midstride.engine.cli.output import say_stopping
from midstride.engine.errors import StopRequested, StopSignal
from midstride.engine.processes.signal_handlers import SignalHandler, signal_handlers

__all__ = ["stop_signals", "stoppable"]


@contextmanager
def stop_signals(error_of: Callable[[signal.Signals], BaseException], most: float = math.inf) -> Iterator[None]:
    """Report and raise a request to stop wherever the block is.

    Call it in the main thread.

    Args:
        error_of: makes the exception for a signal.
        most: how many signals do so; those that follow are ignored.
    """
    asked = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked <= most:
            say_stopping(number, again=asked > 1)
            raise error_of(signal.Signals(number))

    handlers: dict[int, SignalHandler] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), stop)
    handlers[signal.SIGUSR1] = signal.SIG_IGN  # `launch` hears it while there is a world
    with signal_handlers(handlers):
        yield


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn signals to stop into `StopRequested`, which ends the block wherever it is.

    Call it in the main thread. Inside the block it is a `StopSignal`, which no `except Exception` catches.
    """
    try:
        with stop_signals(lambda asked: StopSignal(f"asked to stop by {asked.name}; the same command resumes", asked)):
            yield
    except StopSignal as stop_signal:
        raise StopRequested(str(stop_signal)) from None
