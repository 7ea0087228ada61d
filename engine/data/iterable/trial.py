"""Checks at the start that a stream can be read again and resumes from its state.

At the start of each attempt some samples are read from copies of the data set: once while states are taken, once more
from the start, once from each state, and once by copies of which each resumes from a state of the one before. States
from the first one on with which the stream does not resume correctly are not used: a resume reads again from the last
correct state, or from the start of the epoch.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from midstride.engine.data.data_owners import Attribute, Nodes, differing_attributes
from midstride.engine.data.iterable.shard_state import ShardState
from midstride.engine.errors import EngineError, NotExact, UnsupportedState, UserCodeError

__all__ = ["Trial", "try_stream"]

#: largest number of samples and seconds for each copy; enough to see samples from a shuffle buffer
SAMPLES, SECONDS = 1024, 0.3
#: number of samples to read even of a slow stream, and seconds after which no further batch of it is read
FEW_SAMPLES, MOST_SECONDS = 128, 5.0
#: smallest number of batches to compare
FEW_BATCHES = 3
#: number of samples that are read again from the start
REPEATS = 64
#: numbers of batches after which states are taken and checked
CUTS = (1, 3, 9, 27, 81, 243)


class ShardReading(Protocol):
    """A shard that is read without collating."""

    def next_digest(self) -> int | None:
        """Read a batch; return a digest of all samples so far, None at the end."""

    def state(self) -> ShardState | None:
        """Return the state to resume from; None if there is none."""

    def contents(self) -> Nodes:
        """Return the attributes of a loader that is read as a stream."""
        ...


@dataclass
class Trial:
    """The result of `try_stream`.

    Args:
        refused: why states are not used; None if they are, or if the stream has none.
        passed: number of batches before the last correct state; 0 if there is none.
        batches: number of batches read.
        seconds: seconds for reading them once.
        is_tried: whether the stream was fast enough for the check.
        local: attributes of a loader that differ after a resume from its state, such as a start; None if not tried.
    """

    refused: str | None = None
    passed: int = 0
    batches: int = 0
    seconds: float = 0.0
    is_tried: bool = True
    local: set[Attribute] | None = None


@dataclass
class _FirstReading:
    """The result of the first reading: digests, states, and contents one batch after a state."""

    digests: list[int | None] = field(default_factory=list)
    states: list[ShardState] = field(default_factory=list)
    contents: dict[int, Nodes] = field(default_factory=dict)
    failed: str | None = None
    is_over: bool = False


def try_stream(open_: Callable[[ShardState | None, bool], ShardReading], batch_size: int, where: str) -> Trial:
    """Check that a stream gives the same samples again, from its start and from its states.

    Args:
        open_: opens a copy of the stream from a state, or from its start; the second argument says whether the copy
            takes states.
        batch_size: number of samples in a batch.
        where: name of the stream in errors.

    Raises:
        NotExact: read again from its start, it gives other samples.
        UnsupportedState: its state cannot be written to a snapshot.
    """
    began = time.monotonic()
    try:
        first = _read_first(open_(None, True), batch_size)
    except UnsupportedState:
        raise
    except EngineError as error:
        return Trial(_last_line(error))
    seconds = time.monotonic() - began
    if not first.is_over and len(first.digests) < FEW_BATCHES:
        return Trial(None, 0, len(first.digests), seconds, is_tried=False)
    again = open_(None, False)
    for number, digest in enumerate(first.digests[: max(2, REPEATS // batch_size)]):
        if again.next_digest() != digest:
            raise NotExact(
                f"{where} gives other samples when it is read again from its start (in batch {number}). It draws from "
                "the clock, the system, or a generator that cannot be found, takes away what it reads, or counts its "
                "passes. Draw from torch, numpy.random, random or a generator that is an attribute of the data set, "
                "seeded with a number, and give it set_epoch(epoch), which is called before each pass."
            )
    trial = Trial(first.failed, 0, len(first.digests), seconds, local=set())
    _try_states(trial, open_, first)
    return trial


def _try_states(trial: Trial, open_: Callable[[ShardState | None, bool], ShardReading], first: _FirstReading) -> None:
    """Set `passed`, and `refused` if a state does not bring the stream back, or not twice."""
    for saved in first.states:
        refused, local = _refusal(open_, saved, first)
        if refused is not None:
            trial.refused = refused
            return
        trial.passed, trial.local = saved.batch, local | (trial.local or set())
    if (refused := _chain_refusal(open_, first)) is not None:
        trial.refused, trial.passed = refused, 0


def _read_first(reading: ShardReading, batch_size: int) -> _FirstReading:
    first, began = _FirstReading(), time.monotonic()
    while _reads_more(len(first.digests), batch_size, time.monotonic() - began):
        try:
            first.digests.append(reading.next_digest())
        except UserCodeError:  # training will raise it at this batch
            first.is_over = True
            return first
        if len(first.digests) - 1 in CUTS:
            first.contents[len(first.digests)] = copy.deepcopy(reading.contents())
        if first.digests[-1] is None:
            first.is_over = True
            break
        if len(first.digests) in CUTS and first.failed is None:
            try:
                saved = reading.state()
            except EngineError as error:
                first.failed = _last_line(error)
            else:
                first.states += [] if saved is None else [saved]
    # A state without a batch after it cannot be checked.
    first.states = [saved for saved in first.states if saved.batch < len(first.digests)]
    return first


def _reads_more(batches: int, batch_size: int, seconds: float) -> bool:
    """Return whether to read another batch, up to `SECONDS` or until enough to compare."""
    if batches < FEW_BATCHES or batches * batch_size < FEW_SAMPLES:
        return seconds < MOST_SECONDS
    return (batches + 1) * batch_size <= SAMPLES and seconds < SECONDS


def _refusal(
    open_: Callable[[ShardState | None, bool], ShardReading], saved: ShardState, first: _FirstReading
) -> tuple[str | None, set[Attribute]]:
    """Return why the state is not used, and the attributes that differ after a resume from it."""
    local = set[Attribute]()
    try:
        resumed = open_(saved, True)
        for number in range(saved.batch, len(first.digests)):
            if resumed.next_digest() != first.digests[number]:
                return f"from the state after batch {saved.batch} on, batch {number + 1} was another one", local
            if number == saved.batch:
                local = differing_attributes(first.contents[number + 1], resumed.contents())
    except EngineError as error:
        return _last_line(error), local
    return None, local


def _chain_refusal(open_: Callable[[ShardState | None, bool], ShardReading], first: _FirstReading) -> str | None:
    """Return the error of states taken after a resume, by copies that resume one after another."""
    cuts = [saved.batch for saved in first.states[1:]]
    saved = first.states[0] if cuts else None
    try:
        for end in [*cuts, len(first.digests)]:
            if saved is None:
                break
            resumed = open_(saved, True)
            for number in range(saved.batch, end):
                if resumed.next_digest() != first.digests[number]:
                    what = f"the state after batch {saved.batch}, taken after a resume,"
                    return f"from {what} on, batch {number + 1} was another one"
            saved = resumed.state() if end in cuts else None
    except EngineError as error:
        return _last_line(error)
    return None


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if ": " in line and not line.startswith(" ")]
    return lines[-1] if lines else str(error)
