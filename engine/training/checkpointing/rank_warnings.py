"""Warnings of all ranks, merged and logged by the first."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from midstride.engine.modules import module_state, structure
from midstride.engine.objects import object_state, registered_hooks, unwritable
from midstride.engine.state import stateful
from midstride.engine.training.checkpointing import unsaved_state
from midstride.engine.world import World

__all__ = ["RankWarnings"]

log = logging.getLogger(__name__)

#: where warnings of unsaved state come from
_SOURCES = (module_state, structure, object_state, unwritable, registered_hooks, stateful, unsaved_state)


class RankWarnings:
    """Gathers what the ranks warn of.

    Args:
        world: of these ranks.
        gather: returns every rank's value, in the order of ranks.
    """

    def __init__(self, world: World, gather: Callable[[object], list[Any]]) -> None:
        self._world, self._gather = world, gather

    @contextmanager
    def merge_ranks(self) -> Iterator[None]:
        """Collect warnings, and log them at the end with their ranks; every rank does this at the same point."""
        if self._world.size == 1:
            yield
            return
        own: list[str] = []
        try:
            with _collect_warnings(own):
                yield
        except BaseException:  # the others may not come to gather
            _warn(own)
            raise
        everyone = self._gather(own)
        if self._world.is_first:
            _warn(merge(everyone))


@contextmanager
def _collect_warnings(messages: list[str]) -> Iterator[None]:
    """Let warnings go to `messages` alone."""

    def take(record: logging.LogRecord) -> bool:
        is_warning = record.levelno == logging.WARNING
        if is_warning:
            messages.append(record.getMessage())
        return not is_warning

    loggers = [logging.getLogger(source.__name__) for source in _SOURCES]
    for logger in loggers:
        logger.addFilter(take)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(take)


def _warn(messages: Iterable[str]) -> None:
    for message in messages:
        log.warning("%s", message)


def merge(messages: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each of the ranks' messages once, with the ranks that have it.

    >>> [*merge([["a lock"], ["a lock"]]), *merge([[], ["a file"], ["a file"]])]
    ['a lock (on all ranks)', 'a file (on ranks 1, 2)']
    """
    for message in dict.fromkeys(message for own in messages for message in own):
        ranks = [str(rank) for rank, own in enumerate(messages) if message in own]
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        yield f"{message} (on {'all ranks' if len(ranks) == len(messages) else named})"
