"""Repeats failed calls to a store with growing pauses, for a limited time."""

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["RetryPolicy", "chain_of", "is_transient"]

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0
#: a generator of our own: the global one belongs to the training, whose bits a single number drawn here would change
_JITTER = random.Random()
_TRANSIENT = (
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EAGAIN,
    errno.EBUSY,
)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def is_transient(error: BaseException) -> bool:
    """Whether `error` means that no answer came and a retry can help."""
    return any(
        isinstance(link, (ConnectionError, TimeoutError)) or (isinstance(link, OSError) and link.errno in _TRANSIENT)
        for link in chain_of(error)
    )


class RetryPolicy:
    """Repeats calls that fail with transient errors, for a limited time.

    Args:
        total_s: seconds from the first failure to the last try.
        clock: returns seconds; for tests.
        sleep: waits so many seconds; for tests.
        on_wait: called before each pause, with the seconds waited so far and the error.
    """

    def __init__(
        self,
        total_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        on_wait: Callable[[float, str], object] = lambda waited_s, why: None,
    ) -> None:
        self.total_s = total_s
        self._clock, self._sleep, self._on_wait = clock, sleep, on_wait

    def call(self, act: Callable[[], T], whom: str, transient: Callable[[BaseException], bool] = is_transient) -> T:
        """Return the result of `act`. Repeat it with growing, jittered pauses on transient errors.

        Args:
            act: the call, which can be repeated.
            whom: name of the store, for the log.
            transient: whether a retry can help after an error. Other errors are raised at once.

        Raises:
            Exception: the last error of `act`, after `total_s`.
        """
        failed_at, wait_s = None, FIRST_WAIT_S
        while True:
            try:
                result = act()
            except Exception as error:
                now = self._clock()
                if failed_at is None:
                    failed_at = now
                    if self.total_s and transient(error):
                        log.warning("%s does not answer, waiting up to %g s: %s", whom, self.total_s, error)
                left_s = failed_at + self.total_s - now
                if left_s <= 0 or not transient(error):
                    raise
                self._on_wait(now - failed_at, str(error))
            else:
                if failed_at is not None:
                    log.warning("%s answers again after %.0f s", whom, self._clock() - failed_at)
                return result
            self._sleep(min(left_s, wait_s * _JITTER.uniform(0.5, 1.0)))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
