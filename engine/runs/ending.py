"""Reason for the end of an attempt, as known by its launcher."""

import signal

from midstride.engine.errors import StopRequested
from midstride.engine.runs.cause import cause_of
from midstride.engine.session.attempts import Attempt
from midstride.engine.session.ending import Ending, EndReason
from midstride.engine.session.outcome import SUPERSEDED, Outcome

__all__ = ["ending_of"]


def ending_of(attempt: Attempt, outcome: Outcome, asked_by: BaseException | None = None) -> Ending | None:
    """Return why `attempt` ended; None if its fit is done and has not said why.

    Args:
        attempt: the attempt with its events.
        outcome: how it ended.
        asked_by: the exception by which the launcher was asked to stop, if it was.

    >>> ending_of(Attempt(1), Outcome("died", "rank 1 was killed."))
    Ending(reason=<EndReason.FAILED: 'failed'>, sentence='failed: rank 1 was killed.')
    >>> ending_of(Attempt(1), Outcome("stopped", "asked to stop, after step 3"), KeyboardInterrupt()).sentence
    'stopped by SIGINT'
    """
    if outcome.kind == "done":
        return Ending(EndReason(attempt.ended_by), attempt.why) if attempt.ended_by else None
    if outcome.kind != "stopped":
        return Ending(EndReason.FAILED, f"failed: {cause_of(outcome.error)}")
    if outcome.type == SUPERSEDED:
        return Ending(EndReason.STOPPED, "stopped: a newer attempt trains the run")
    return Ending(EndReason.STOPPED, _stopped(asked_by))


def _stopped(asked_by: BaseException | None) -> str:
    number = signal.SIGINT if isinstance(asked_by, KeyboardInterrupt) else getattr(asked_by, "signal", None)
    if number is not None:
        return f"stopped by {signal.Signals(number).name}"
    return f"stopped: {asked_by}" if isinstance(asked_by, StopRequested) else "stopped on request"
