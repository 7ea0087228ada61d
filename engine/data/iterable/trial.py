"""A stream is tried before it is trusted: read again it gives the same, and its state brings it back to its position.

At the start of each attempt some samples are read from copies of the data set: once with states taken on the way, once
more from the start, and once from each state. From the first state on that does not bring the stream back none is used:
what follows the last one that did, or else the whole epoch, is read again instead.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from midstride.engine.data.iterable.shard_state import ShardState
from midstride.engine.errors import EngineError, NotExact, UnsupportedState, UserCodeError

__all__ = ["Trial", "try_stream"]

#: the most that is read of each copy; what shuffles in a buffer has given some of it by then
SAMPLES, SECONDS = 1024, 0.3
#: what is read of a slow stream all the same, and after how long no other batch of it is begun
FEW_SAMPLES, MOST_SECONDS = 128, 5.0
#: batches below which there is nothing to compare
FEW_BATCHES = 3
#: samples that are read again from the start
REPEATS = 64
#: batches after which a state is tried, as far as the samples go
CUTS = (1, 3, 9, 27, 81, 243)


class ShardReading(Protocol):
    """A shard that is read without being collated."""

    def next_digest(self) -> int | None:
        """Read a batch; return a digest of its samples, None at the end."""

    def state(self) -> ShardState | None:
        """Return the state to go on from; None if there is none."""


@dataclass
class Trial:
    """The result of trying whether the state of a stream brings it back.

    Args:
        refused: why its state is not used; None if it is, or if there is none.
        passed: batches before the last state that brought it back; 0 if there is none.
        batches: read on the way.
        seconds: that reading them once took.
        is_tried: whether it was fast enough to be tried.
    """

    refused: str | None = None
    passed: int = 0
    batches: int = 0
    seconds: float = 0.0
    is_tried: bool = True


@dataclass
class _Walk:
    """The result of a first reading: a digest of each batch, and the states that were taken on the way."""

    digests: list[int | None] = field(default_factory=list)
    states: list[ShardState] = field(default_factory=list)
    failed: str | None = None
    is_over: bool = False


def try_stream(open_: Callable[[ShardState | None, bool], ShardReading], batch_size: int, where: str) -> Trial:
    """Return whether the state of a stream can be trusted.

    Args:
        open_: opens a copy of it from a state or from its start; the second argument says whether states are taken.
        batch_size: samples of a batch.
        where: names it in errors.

    Raises:
        NotExact: read again from its start, it gives other samples.
    """
    began = time.monotonic()
    try:
        walk = _walk(open_(None, True), batch_size)
    except UnsupportedState:
        raise
    except EngineError as error:
        return Trial(_last_line(error))
    seconds = time.monotonic() - began
    if not walk.is_over and len(walk.digests) < FEW_BATCHES:
        return Trial(None, 0, len(walk.digests), seconds, is_tried=False)
    again = open_(None, False)
    for number, digest in enumerate(walk.digests[: max(2, REPEATS // batch_size)]):
        if again.next_digest() != digest:
            raise NotExact(
                f"{where} gives other samples when it is read again from its start (in batch {number}): it draws from "
                "the clock, the system, or a generator that cannot be found, takes away what it reads, or counts its "
                "passes. Draw from torch, numpy.random, random or a generator that is an attribute of the data set, "
                "seeded with a number, and give it set_epoch(epoch), which is called before each pass."
            )
    trial = Trial(walk.failed, 0, len(walk.digests), seconds)
    for saved in walk.states:
        if (refused := _refusal(open_, saved, walk.digests)) is not None:
            trial.refused = refused
            break
        trial.passed = saved.batch
    return trial


def _walk(reading: ShardReading, batch_size: int) -> _Walk:
    walk, began = _Walk(), time.monotonic()
    while _goes_on(len(walk.digests), batch_size, time.monotonic() - began):
        try:
            walk.digests.append(reading.next_digest())
        except UserCodeError:  # the run comes to it, too
            walk.is_over = True
            return walk
        if walk.digests[-1] is None:
            walk.is_over = True
            break
        if len(walk.digests) in CUTS and walk.failed is None:
            try:
                saved = reading.state()
            except EngineError as error:
                walk.failed = _last_line(error)
            else:
                walk.states += [] if saved is None else [saved]
    # What nothing was read after has not been tried.
    walk.states = [saved for saved in walk.states if saved.batch < len(walk.digests)]
    return walk


def _goes_on(batches: int, batch_size: int, seconds: float) -> bool:
    """Return whether another batch is read: a fast stream for a moment, a slow one until there is enough to compare."""
    if batches < FEW_BATCHES or batches * batch_size < FEW_SAMPLES:
        return seconds < MOST_SECONDS
    return (batches + 1) * batch_size <= SAMPLES and seconds < SECONDS


def _refusal(
    open_: Callable[[ShardState | None, bool], ShardReading], saved: ShardState, digests: list[int | None]
) -> str | None:
    try:
        resumed = open_(saved, True)
        for number in range(saved.batch, len(digests)):
            if resumed.next_digest() != digests[number]:
                return f"from the state after batch {saved.batch} on, batch {number + 1} was another one"
    except EngineError as error:
        return _last_line(error)
    return None


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if ": " in line and not line.startswith(" ")]
    return lines[-1] if lines else str(error)
