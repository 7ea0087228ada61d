"""Handlers of signals for the time of a block."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

__all__ = ["SignalHandler", "signal_handlers"]

SignalHandler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def signal_handlers(handlers: Mapping[int, SignalHandler]) -> Iterator[None]:
    """Set handlers of signals until the block ends, and then the previous ones again.

    Outside the main thread, where Python sets no handlers, nothing is changed.

    Args:
        handlers: by the number of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
