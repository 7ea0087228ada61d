"""Signals that ask a process to stop, for threads in which Python handles none."""

import os
import signal
import threading
import time
from contextlib import suppress

__all__ = ["listen", "read_signals", "stop_signal_since"]

_STOPS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def listen() -> bool:
    """Receive the numbers of signals from now on. Return True if so.

    Only the main thread can start it. Call it as early as possible: signals before the first call are unknown.
    """
    global _listener
    if threading.current_thread() is threading.main_thread():
        _listener = _listener or _SignalListener()
        _listener.listen()
    return _listener is not None


def read_signals() -> None:
    """Note signals from now on, in a thread; those before are forgotten."""
    if _listener is not None:
        _listener.read()


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
        self._lock, self._is_read = threading.Lock(), False

    def listen(self) -> None:
        """Receive the numbers: an event loop may have taken that place since."""
        others = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        if others not in (self._wakeup, -1):
            self._pass_on_to(others)
            self.read()  # it waits for them

    def _pass_on_to(self, others: int) -> None:
        """Take a descriptor of one's own: the number of a closed loop is soon that of another file."""
        with self._lock:
            self._stop_passing_on()
            with suppress(OSError):  # it is closed already
                self._others = os.dup(others)

    def _stop_passing_on(self) -> None:
        if self._others >= 0:
            os.close(self._others)
        self._others = -1

    def read(self) -> None:
        """Start the thread that reads them, if there is none."""
        with self._lock:
            if self._is_read:
                return
            self._is_read = True
            os.set_blocking(self._numbers, False)
            with suppress(BlockingIOError):
                while os.read(self._numbers, 1 << 16):
                    continue
            os.set_blocking(self._numbers, True)
            threading.Thread(target=self._read, name="midstride signals", daemon=True).start()

    def _read(self) -> None:
        while numbers := os.read(self._numbers, 64):
            for number in numbers:
                if number in _STOPS:
                    self.newest = signal.Signals(number), time.monotonic()
            with self._lock:
                self._tell_others(numbers)

    def _tell_others(self, numbers: bytes) -> None:
        if self._others < 0:
            return
        try:
            os.write(self._others, numbers)
        except BlockingIOError:  # full: they are being told already
            return
        except OSError:  # the loop is closed
            self._stop_passing_on()


def _forget() -> None:
    """Leave the pipe to the parent after a fork: a signal to the child is none to the parent."""
    global _listener
    if _listener is not None:
        signal.set_wakeup_fd(-1)
        _listener = None


_listener: _SignalListener | None = None
os.register_at_fork(after_in_child=_forget)
