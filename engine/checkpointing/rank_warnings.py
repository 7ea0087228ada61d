"""Warnings of all ranks, merged and logged by rank 0."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from midstride.engine.world import World

__all__ = ["RankWarnings"]

log = logging.getLogger(__name__)

#: loggers of packages and modules that inspect state, whose warnings may come on any rank
_SOURCES = [
    logging.getLogger(f"midstride.engine.{name}")
    for name in ("modules", "objects", "state", "checkpointing.unsaved_state")
]


class RankWarnings:
    """Gathers the warnings of all ranks.

    Args:
        world: world of this rank.
        gather: returns every rank's value, in the order of ranks.
    """

    def __init__(self, world: World, gather: Callable[[object], list[Any]]) -> None:
        self._world, self._gather = world, gather

    @contextmanager
    def merge_ranks(self) -> Iterator[None]:
        """Collect warnings in the block, and log them at its end with their ranks.

        Every rank enters it together.
        """
        if self._world.size == 1:
            yield
            return
        own: list[str] = []
        try:
            with _collect_warnings(own):
                yield
        except BaseException:  # other ranks may not call gather
            _warn(own)
            raise
        everyone = self._gather(own)
        if self._world.is_first:
            _warn(merge(everyone))


class _Collector(logging.Handler):
    """Keeps this thread's warnings; passes other records to the parent logger's handlers."""

    def __init__(self, messages: list[str], parent: logging.Logger) -> None:
        super().__init__()
        self._messages, self._parent, self._thread = messages, parent, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Handle a record of the logger or one below it."""
        if record.levelno == logging.WARNING and record.thread == self._thread:
            self._messages.append(record.getMessage())
        else:
            self._parent.callHandlers(record)


@contextmanager
def _collect_warnings(messages: list[str]) -> Iterator[None]:
    """Append warnings of this thread to `messages` instead of logging them."""
    with ExitStack() as stack:
        for logger in _SOURCES:
            assert logger.parent is not None
            collector = _Collector(messages, logger.parent)
            logger.addHandler(collector)
            stack.callback(logger.removeHandler, collector)
            stack.callback(setattr, logger, "propagate", logger.propagate)
            logger.propagate = False
        yield


def _warn(messages: Iterable[str]) -> None:
    for message in messages:
        log.warning("%s", message)


def merge(messages: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each message once, with the ranks that have it.

    >>> [*merge([["a lock"], ["a lock"]]), *merge([[], ["a file"], ["a file"]])]
    ['a lock (on all ranks)', 'a file (on ranks 1, 2)']
    """
    for message in dict.fromkeys(message for own in messages for message in own):
        ranks = [str(rank) for rank, own in enumerate(messages) if message in own]
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        yield f"{message} (on {'all ranks' if len(ranks) == len(messages) else named})"
