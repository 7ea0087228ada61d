"""Heartbeats: a rank's phase and progress in shared memory, read by its launcher. No torch.

A beat costs a quarter of a microsecond. It is written where a rank makes progress, at the end of a batch: a rank whose
beats stop is stuck, whatever it is stuck in.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from midstride.engine.session.session import Session
from midstride.engine.world import World

__all__ = ["Heartbeat", "HeartbeatReading", "Phase"]

_FIELDS = 8
_BYTES = 8 * _FIELDS
_PID, _BEATS, _PHASE, _STEP, _BATCHES, _WORKED, _WORKS, _SUSPENDED = range(_FIELDS)


class Phase(IntEnum):
    """Activity of a rank; each phase has its own limit for a hang."""

    STARTING = 0  #: until its first step is done
    TRAINING = 1
    EVALUATING = 2  #: a validation, and hooks at the ends of epochs
    WAITING = 3  #: for a store, or for data to be prepared: as long as it takes
    ENDED = 4


@dataclass(frozen=True)
class HeartbeatReading:
    """A heartbeat at one moment.

    Args:
        pid: the rank's process.
        beats: batches done in this attempt, of training and validation.
        phase: its present work.
        step: optimizer steps taken.
        batches: training batches done in this attempt.
        worked_s: seconds spent on reading them and in the training step: its own, not those spent waiting for others.
        works: whether it is reading a batch or running the training step now.
        is_suspended: whether its process is stopped, by SIGSTOP or a debugger; told of ranks on other machines alone.
    """

    pid: int = 0
    beats: int = 0
    phase: Phase = Phase.STARTING
    step: int = 0
    batches: int = 0
    worked_s: float = 0.0
    works: bool = False
    is_suspended: bool = False

    @classmethod
    def read(cls, path: Path) -> "HeartbeatReading":
        """Return the heartbeat in the file at `path`; without a file, that of an unstarted rank."""
        try:
            data = memoryview(path.read_bytes()).cast("q")
        except FileNotFoundError:
            return cls()
        if len(data) < _FIELDS:
            return cls()
        return cls(
            pid=data[_PID],
            beats=data[_BEATS],
            phase=Phase(data[_PHASE]),
            step=data[_STEP],
            batches=data[_BATCHES],
            worked_s=data[_WORKED] / 1e9,
            works=bool(data[_WORKS]),
            is_suspended=bool(data[_SUSPENDED]),
        )

    def write(self, path: Path) -> None:
        """Write this reading, of a rank on another machine, to `path`, where a launcher reads it."""
        numbers = (self.pid, self.beats, self.phase, self.step, self.batches, round(self.worked_s * 1e9))
        path.write_bytes(struct.pack(f"={_FIELDS}q", *numbers, self.works, self.is_suspended))


class Heartbeat:
    """The writing end.

    Args:
        path: file to write to; None writes nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._began = 0
        if path is None:
            self._cells = memoryview(bytearray(_BYTES)).cast("q")
            return
        with path.open("a+b") as file:
            file.truncate(_BYTES)
            self._cells = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")
        self._cells[_PID] = os.getpid()

    @classmethod
    def of(cls, world: World) -> "Heartbeat":
        """Return the heartbeat of this rank; it is written to the session, if there is one."""
        session = Session.from_environment()
        return cls(session.heartbeat(world.rank) if session else None)

    @property
    def phase(self) -> Phase:
        """Current activity of this rank."""
        return Phase(self._cells[_PHASE])

    def enter(self, phase: Phase) -> None:
        """Set the phase of this rank."""
        self._cells[_PHASE] = phase

    def beat(self, step: int) -> None:
        """Count a batch, and set how many optimizer steps the run has taken."""
        cells = self._cells
        cells[_BEATS] += 1
        cells[_STEP] = step
        if cells[_PHASE] == Phase.STARTING:
            cells[_PHASE] = Phase.TRAINING

    def begin_work(self) -> None:
        """Start to measure this rank's own work on a training batch."""
        self._cells[_WORKS] = 1
        self._began = time.perf_counter_ns()

    def end_work(self, batches: int = 0) -> None:
        """Add the time since `begin_work`, and the number of training batches that were read in it."""
        cells = self._cells
        cells[_WORKED] += time.perf_counter_ns() - self._began
        cells[_BATCHES] += batches
        cells[_WORKS] = 0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` until the block ends."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)
