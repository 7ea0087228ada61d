"""Log of each round: its events and its end."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from midstride.engine.session.attempts import Attempt, Verdict, retry_verdict
from midstride.engine.session.events import Event, EventLog
from midstride.engine.session.outcome import Outcome

__all__ = ["RoundLog"]

#: rounds in a row without a newer snapshot that are followed by another
_RETRIES = 3


class RoundLog:
    """Keeps every round as an attempt, and writes the events of all of them to one file.

    Args:
        events: the file.
    """

    def __init__(self, events: Path) -> None:
        self._events = EventLog(events)
        self._ended: list[Attempt] = []
        self._round = Attempt(0)

    def begin(self, number: int, hosts: Sequence[str], ranks: int, why: str) -> None:
        """Begin a round of nodes and their ranks; `why` it follows another, "" if it does not."""
        self._round = Attempt(number, started=time.time())
        self.write(Event("round", time.time(), {"number": number, "nodes": list(hosts), "ranks": ranks, "why": why}))

    def write(self, event: Event) -> None:
        """Write an event of the round that was begun last."""
        self._events.copy(event)
        self._round = self._round.after(event)

    def close(self, outcome: Outcome) -> None:
        """Keep what came of the round that was begun last."""
        self._ended.append(
            replace(self._round, outcome=outcome.kind, type=outcome.type, error=outcome.error, step=outcome.step)
        )

    def verdict(self) -> Verdict:
        """Return whether another round makes sense."""
        return retry_verdict(self._ended, _RETRIES)
