"""Attempts that nobody was left to write down: their launcher was killed, but its session may still be here."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from midstride.engine.errors import EngineError
from midstride.engine.events import Event, EventTail
from midstride.engine.job import TrainingJob
from midstride.engine.launchers.lifeline import marked
from midstride.engine.ledger import Attempt, Ledger
from midstride.engine.outcome import Outcome, decide
from midstride.engine.session import Session
from midstride.engine.snapshots.store import Store

__all__ = ["settle_lost"]

_STARTING_S = 5.0  # a launcher that has made its session has started its world by then


def settle_lost(job: TrainingJob, run: str) -> list[Attempt]:
    """Complete the ledger with what killed launchers of this run left on this machine; return those attempts.

    Their worlds stopped by themselves (a keeper saw to it) and wrote how far they got. Call it before a new attempt,
    or before a report.
    """
    ledger = Ledger(Store.open(job.run_url(run)))
    lost = {attempt.number: attempt for attempt in ledger.attempts() if attempt.outcome == "lost"}
    settled = []
    for number, session in _left_behind(job, run) if lost else ():
        if number in lost and not _still_running(session, lost[number]):
            events = EventTail(session.events).new()
            ended = max([event.time for event in events] + [said.time for said in session.outcomes()], default=None)
            attempt = _completed(lost[number], events)
            settled.append(ledger.record(attempt, _outcome(session, job), ended=ended))
            session.remove()
    return settled


def _left_behind(job: TrainingJob, run: str) -> Iterator[tuple[int, Session]]:
    for folder in sorted(Path(tempfile.gettempdir()).glob("midstride-*")):
        try:
            theirs, name, number = Session(folder).read()
        except (EngineError, OSError, ValueError, KeyError):
            continue  # not a session, or one of another version
        if number and name == run and theirs.run_url(name) == job.run_url(run):
            yield number, Session(folder)


def _still_running(session: Session, attempt: Attempt) -> bool:
    return bool(marked(Session.VARIABLE, str(session.folder))) or time.time() - attempt.started < _STARTING_S


def _outcome(session: Session, job: TrainingJob) -> Outcome:
    outcome = decide(session.outcomes(), None, job.world.processes)
    why = "whoever had launched this world was killed"
    return replace(outcome, error=f"{why}; then {outcome.error}" if outcome.error else why)


def _completed(attempt: Attempt, events: Sequence[Event]) -> Attempt:
    for event in events:
        fields = event.fields
        if event.kind == "resumed":
            attempt = replace(
                attempt,
                generation=fields.get("generation"),
                resumed_from=fields.get("resumed_from"),
                resumed_step=fields.get("step"),
            )
        elif event.kind == "snapshot":
            attempt = replace(attempt, snapshot=fields.get("name"), step=fields.get("step"))
        elif event.kind == "step":
            attempt = replace(attempt, step=fields.get("step"), first_step_at=attempt.first_step_at or event.time)
    return attempt
