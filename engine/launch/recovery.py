"""Records attempts whose launcher was killed or whose store failed, from their sessions."""

import functools
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import processes_with_env
from midstride.engine.runs.ending import ending_of
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import Attempt
from midstride.engine.session.events import EventTail
from midstride.engine.session.outcome import Outcome, decide
from midstride.engine.session.private_file import is_own_folder
from midstride.engine.session.session import Session

__all__ = ["recover_orphaned_attempts"]

log = logging.getLogger(__name__)


def recover_orphaned_attempts(run: Run) -> list[Attempt]:
    """Complete the attempt log with sessions left on this machine; return these attempts.

    Where one was killed, its supervisor stopped the world, which wrote how far it got; where the store did not take
    down how the attempt ended, the launcher kept that in the session. `launch` calls it before a new
    attempt. Sessions of deleted runs are removed.
    """
    attempt_log = run.attempts
    lost = {_key(attempt): attempt for attempt in attempt_log.attempts() if attempt.outcome == "lost"}
    settled = []
    for number, started, session in _orphaned_sessions(run):
        if _still_running(session):
            continue
        if (begun := lost.get((number, started))) is None:  # of a deleted run, or of an attempt with a record
            session.remove()
            continue
        try:
            attempt, outcome, ended = _outcome_of(session, begun, run.job)
        except Exception as error:
            log.warning("the files of attempt %d in %s cannot be read: %s", number, session.folder, error)
            continue
        settled.append(attempt_log.record(attempt, outcome, ending_of(attempt, outcome), ended=ended))
        session.remove()
    return settled


def _key(attempt: Attempt) -> tuple[int, float]:
    return attempt.number, attempt.started


def _orphaned_sessions(run: Run) -> Iterator[tuple[int, float, Session]]:
    for folder in sorted(Path(tempfile.gettempdir()).glob("midstride-*")):
        if not is_own_folder(folder):
            continue
        try:
            document = Session(folder).document()
            number, started = document["attempt"], document["started"]
            url = Run.from_document(document).url
            is_ours = url == run.url or (started > 0 and _is_deleted(url))
        except Exception:
            continue  # not a session, or one of another version
        if is_ours:
            yield number, started, Session(folder)


def _is_deleted(url: str) -> bool:
    return "://" not in url and not Path(url).exists()


def _still_running(session: Session) -> bool:
    return session.is_locked() or bool(processes_with_env(Session.VARIABLE, str(session.folder)))


def _outcome_of(session: Session, attempt: Attempt, job: TrainingJob) -> tuple[Attempt, Outcome, float | None]:
    """Return `attempt` with the events of the world in `session`, its outcome and its end."""
    events, outcomes = EventTail(session.events).new(), session.outcomes()
    ended = max([event.time for event in events] + [said.time for said in outcomes], default=None)
    return functools.reduce(Attempt.after, events, attempt), _outcome_left(session, outcomes, job), ended


def _outcome_left(session: Session, outcomes: list[Outcome], job: TrainingJob) -> Outcome:
    """Return the outcome with why it was not recorded when the world ended."""
    if unrecorded := session.unrecorded():
        outcome, said = unrecorded
        why = f"recorded late: the store did not accept the end of this attempt ({said})"
        return replace(outcome, error="\n".join(filter(None, (outcome.error, why))))
    outcome = decide(outcomes, None, session.ranks or job.world.processes)
    why = "the process that launched this world was killed"
    return replace(outcome, error=f"{why}; then {outcome.error}" if outcome.error else why)
