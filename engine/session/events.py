"""Events of an attempt: one JSON line each, in a local file named by the launcher.

kind        fields
imported                                                 (torch, and the user's module)
met                                                      (all ranks have met)
started     step, steps_total, generation
resumed     generation, resumed_from, step
step        epoch, step, steps_total, loss, rate         (rank 0, at most two a second)
snapshot    name, step, bytes, stall_s                   (committed)
waiting     rank, waited_s, why                          (for the store, on any rank; one a second for each reason)
validation  step, metrics
finished    step, ended_by, why
slow        rank, words                                  (from the launcher)
round       number, nodes, ranks, why                    (nodes that train from now on, by the launcher)
"""

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.session.private_file import open_own
from midstride.engine.storage.checksums import NUMBER, decode_object

__all__ = ["Event", "EventLog", "EventTail"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Args:
        kind: what happened.
        time: when, in seconds since the epoch.
        fields: the rest, by name.
    """

    kind: str
    time: float
    fields: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """The writing end: appends to `path`, one line at a time.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> EventLog(path).emit("snapshot", name="000000000020-g000001", step=20)
    >>> [(event.kind, event.fields["step"]) for event in EventTail(path).new()]
    [('snapshot', 20)]
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event; values must be JSON (a value that is not is written as its text)."""
        self.copy(Event(kind, time.time(), fields))

    def copy(self, event: Event) -> None:
        """Write an event that happened elsewhere."""
        line = json.dumps({"kind": event.kind, "time": event.time, **event.fields}, default=str)
        # Opened for each of these rare lines: nothing to close, nothing to flush, nothing for a fork to inherit.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class EventTail:
    """The reading end: hands out each event of `path` once."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._offset = 0

    def new(self) -> list[Event]:
        """Return the events since the last call; an unfinished line is left for the next one."""
        try:
            with open_own(self.path) as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        found = (self._event(line) for line in whole.splitlines() if line.strip())
        return [event for event in found if event is not None]

    def _event(self, line: bytes) -> Event | None:
        """Return the event of a line; None of one that is cut off, as a full disk leaves it."""
        try:
            document = decode_object(line, str(self.path), kind=str, time=NUMBER)
        except SnapshotDamaged as error:
            log.warning("an event is left out: %s", error)
            return None
        return Event(document.pop("kind"), document.pop("time"), document)
