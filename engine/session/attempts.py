"""The attempts of a run: one file per attempt, and whether another attempt makes sense.

    <run>/attempts/000001.json   created when the attempt starts, rewritten once when it ends

Exact resume makes errors repeatable, so trying again is not a matter of luck: an attempt that got
to a newer snapshot pays for the next one; the same error at the same step twice ends it.
"""

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import NoneType
from typing import Any

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.session.ending import Ending
from midstride.engine.session.events import Event
from midstride.engine.session.outcome import CODES, SUPERSEDED, Outcome
from midstride.engine.storage.checksums import NUMBER, Kind, check_kinds, decode_object
from midstride.engine.storage.store import Store

__all__ = ["Attempt", "AttemptLog", "Verdict", "fatal_snapshots", "retry_verdict"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"\d{6,}\.json", re.ASCII)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run: a world from its start to its end.

    Args:
        number: from 1.
        outcome: how it ended; "lost" if its launcher was killed before it wrote it down.
        code: the exit code of that outcome.
        type: the exception's full name, if there was one.
        error: its message.
        step: optimizer steps taken by then, if known.
        rank: the rank that decided the outcome.
        generation: its lease, if it got so far.
        resumed_from: the snapshot it resumed from; None for a fresh start.
        resumed_step: the step of that snapshot.
        snapshot: the newest committed snapshot when it ended.
        started: when, in seconds since the epoch.
        ended: when it ended.
        stopped: when a stop was asked for after its end: before the next attempt, or while its weights were tested.
        first_step_at: when its first new step was done.
        slow: about the ranks for which the others had to wait.
        ended_by: why it ended, an `EndReason`; empty until then.
        why: the same as a sentence.
        rounds: of a world on several nodes: number, nodes, ranks and why, and from which snapshot each went on.
    """

    number: int
    outcome: str = "lost"
    code: int = 1
    type: str = ""
    error: str = ""
    step: int | None = None
    rank: int = 0
    generation: int | None = None
    resumed_from: str | None = None
    resumed_step: int | None = None
    snapshot: str | None = None
    started: float = 0.0
    ended: float | None = None
    stopped: float | None = None
    first_step_at: float | None = None
    slow: tuple[str, ...] = ()
    rounds: tuple[Mapping[str, Any], ...] = ()
    ended_by: str = ""
    why: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it has no recorded end: it is running, or its launcher was killed."""
        return self.outcome == "lost" and self.ended is None

    @property
    def failed(self) -> bool:
        """Whether it ended by an error that a retry may get past."""
        return self.outcome in ("died", "lost")

    def after(self, event: Event) -> "Attempt":
        """Return this attempt with the facts of `event` from its world."""
        step, generation = event.fields.get("step"), event.fields.get("generation", self.generation)
        if event.kind == "started":
            return replace(self, step=step, generation=generation)
        if event.kind == "resumed":
            resumed_from = event.fields.get("resumed_from")
            rounds = (*self.rounds[:-1], *({**last, "resumed_from": resumed_from} for last in self.rounds[-1:]))
            return replace(self, generation=generation, resumed_from=resumed_from, resumed_step=step, rounds=rounds)
        if event.kind == "snapshot":
            return replace(self, step=step, snapshot=event.fields.get("name"))
        if event.kind == "step":
            return replace(self, step=step, first_step_at=self.first_step_at or event.time)
        if event.kind == "slow":
            return replace(self, slow=(*self.slow, event.fields["words"]))
        if event.kind == "round":
            return replace(self, rounds=(*self.rounds, event.fields))
        if event.kind == "finished":
            return replace(self, ended_by=event.fields.get("ended_by", ""), why=event.fields.get("why", ""))
        return self


@dataclass(frozen=True)
class Verdict:
    """Whether to try again, and why."""

    retry: bool
    reason: str


#: after an attempt that did not fail
_FINAL = {
    "done": Verdict(False, "the run is done"),
    "user_error": Verdict(False, "the job or the code is wrong: a retry would fail again"),
    "superseded": Verdict(False, "a newer attempt advances this run"),
    "stopped": Verdict(True, "it was stopped on request and resumes"),
}


class AttemptLog:
    """The attempts of one run.

    Args:
        store: the run's own folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store.at("attempts")

    def begin(self) -> Attempt:
        """Write down that an attempt starts; return it, numbered after all others."""
        number = max(map(_number, self._names()), default=0) + 1
        while True:
            attempt = Attempt(number, started=time.time())
            if self._store.create(_name(number), _encode(attempt)):
                return attempt
            number += 1  # another world took it

    def record(
        self, attempt: Attempt, outcome: Outcome, ending: Ending | None = None, *, ended: float | None = None
    ) -> Attempt:
        """Write down how `attempt` ended, why, and when: now, if nothing else is said."""
        over = replace(
            attempt,
            outcome=outcome.kind,
            code=outcome.code,
            type=outcome.type,
            error=outcome.error,
            step=outcome.step if outcome.step is not None else attempt.step,
            rank=outcome.rank,
            ended=time.time() if ended is None else ended,
            ended_by=ending.reason.value if ending else attempt.ended_by,
            why=ending.sentence if ending else attempt.why,
        )
        self._store.write(_name(attempt.number), _encode(over))
        return over

    def withdraw(self, attempt: Attempt) -> None:
        """Remove the record of `attempt`, a refused command."""
        self._store.remove(_name(attempt.number))

    def record_stop(self) -> None:
        """Record a request to stop after the end of the newest attempt, unless it was stopped."""
        last = next(reversed(self.attempts()), None)
        if last is not None and not last.is_open and last.outcome != "stopped":
            self._store.write(_name(last.number), _encode(replace(last, stopped=time.time())))

    def attempts(self) -> list[Attempt]:
        """Return all attempts, oldest first."""
        found = [self._attempt(name) for name in self._names()]
        return [attempt for attempt in found if attempt is not None]

    def _attempt(self, name: str) -> Attempt | None:
        where = f"{self._store.url}/{name}"
        try:
            with self._store.reading(name):
                return _decode(self._store.read(name), where)
        except SnapshotDamaged as error:
            log.warning("that attempt does not count: %s", error)
        return None

    def verdict(self, retries: int, *, after: int = 0) -> Verdict:
        """Say whether another attempt makes sense.

        Args:
            retries: attempts without progress that are forgiven.
            after: leave attempts up to this number out of the count: who asked for a retry
                by hand, knowing of them, wants to be given as many again.
        """
        return retry_verdict(self.attempts(), retries, after=after)

    def _names(self) -> list[str]:
        """Return the names of all attempts' files, without other files beside them."""
        return sorted(name for name in self._store.list("") if _NAME.fullmatch(name))


def retry_verdict(attempts: Sequence[Attempt], retries: int, *, after: int = 0) -> Verdict:
    """Say whether another attempt makes sense after `attempts`, oldest first."""
    if not attempts:
        return Verdict(True, "nothing was tried yet")
    last = attempts[-1]
    if not last.failed:
        return _FINAL["superseded" if last.type == SUPERSEDED else last.outcome]
    if same := _same_error(attempts, after):
        twice = f"attempts {same.number} and {last.number}"
        return Verdict(False, f"{last.type} at step {last.step} in {twice}: a retry would meet it again")
    idle = _without_progress(attempts, after)
    if idle > retries:
        tried = f"{idle} attempts in a row" if idle > 1 else "the attempt"
        return Verdict(False, f"{tried} got no further than the last snapshot")
    if idle == 0:
        return Verdict(True, f"it got as far as snapshot {last.snapshot}")
    return Verdict(True, f"attempt {idle} of {retries + 1} without a newer snapshot")


def fatal_snapshots(attempts: Sequence[Attempt]) -> dict[str, list[int]]:
    """Return snapshots from which the last two or more attempts died before a new step.

    The value is the attempts' numbers.

    A stop on request, an error in the user's code and a launcher that was killed say nothing against a snapshot.
    """
    deaths: dict[str, list[int]] = {}
    for attempt in attempts:
        if attempt.resumed_from and attempt.first_step_at:
            deaths.pop(attempt.resumed_from, None)
        elif attempt.resumed_from and attempt.outcome == "died":
            deaths.setdefault(attempt.resumed_from, []).append(attempt.number)
    return {name: numbers for name, numbers in deaths.items() if len(numbers) >= 2}


def _same_error(attempts: Sequence[Attempt], after: int) -> Attempt | None:
    """The attempt before the last, if it failed by the same exception at the same step."""
    last = attempts[-1]
    failed = [attempt for attempt in attempts[:-1] if attempt.failed and attempt.number > after]
    # An engine's error speaks of the world around it (a store, a peer), which does change.
    if not failed or not last.type or last.type.startswith("midstride.") or last.step is None:
        return None
    before = failed[-1]
    return before if (before.type, before.step) == (last.type, last.step) else None


def _without_progress(attempts: Sequence[Attempt], after: int) -> int:
    """Return the number of failed attempts at the end of the list without a newer snapshot."""
    idle, newest = 0, ""
    for attempt in attempts:
        position = _position(attempt.snapshot or attempt.resumed_from)
        if position > newest or attempt.outcome == "user_error":  # after that one, the code was changed
            idle = 0
        elif attempt.failed and attempt.number > after:
            idle += 1
        newest = max(newest, position)
    return idle


def _position(snapshot: str | None) -> str:
    """The part of a snapshot's name that is its position; such texts sort as the positions do."""
    return (snapshot or "").rpartition("-g")[0]


def _name(number: int) -> str:
    return f"{number:06d}.json"


def _number(name: str) -> int:
    return int(name.removesuffix(".json"))


def _encode(attempt: Attempt) -> bytes:
    said = asdict(attempt)
    for rare in ("rounds", "stopped", "ended_by", "why"):  # only worlds on several nodes have the first
        if not said[rare]:
            del said[rare]
    return json.dumps(said, indent=2).encode()


def _decode(data: bytes, where: str) -> Attempt:
    found = decode_object(data, where, number=int)
    check_kinds(found, where, **_KINDS)
    if found.get("outcome", "lost") not in (*CODES, "lost"):
        raise SnapshotDamaged(f"{where} names an unknown outcome: {found['outcome']!r}")
    return Attempt(**{key: value for key, value in found.items() if key in _KINDS})


_TEXT, _INTEGER, _SECONDS = (str, NoneType), (int, NoneType), (*NUMBER, NoneType)
#: the keys of an attempt's document, and their types
_KINDS: dict[str, Kind] = {
    "number": int,
    "outcome": str,
    "code": int,
    "type": str,
    "error": str,
    "step": _INTEGER,
    "rank": int,
    "generation": _INTEGER,
    "resumed_from": _TEXT,
    "resumed_step": _INTEGER,
    "snapshot": _TEXT,
    "started": NUMBER,
    "ended": _SECONDS,
    "stopped": _SECONDS,
    "first_step_at": _SECONDS,
    "slow": list,
    "rounds": list,
    "ended_by": str,
    "why": str,
}
