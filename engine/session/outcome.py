"""End of a rank and of an attempt, decided by files that the ranks write.

Texts and exit codes of launchers decide nothing.

torchrun turns every exit code of a rank into 1. An abort during the teardown of a finished process changes its code,
too. The file that a rank wrote before it left is the truth. A rank without one was killed.

kind        code  meaning
done           0  the run came to its own end
stopped       75  stopped on request; a retry resumes
user_error     2  the job or the user's code is wrong; a retry cannot help
died           1  everything else; a retry may help
"""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import NoneType
from typing import Literal

from midstride.engine import errors
from midstride.engine.errors import EngineError, StopRequested, StopSignal, Superseded, UserError, WorldError
from midstride.engine.formatting import format_message

__all__ = ["CODES", "SUPERSEDED", "Kind", "Outcome", "decide", "not_started", "raise_for_outcome"]

Kind = Literal["done", "stopped", "user_error", "died"]

#: `Outcome.type` of a rank that found a newer world
SUPERSEDED = f"{Superseded.__module__}.{Superseded.__qualname__}"

#: what a process ends with
CODES: dict[Kind, int] = {"done": 0, "stopped": 75, "user_error": 2, "died": 1}


@dataclass(frozen=True)
class Outcome:
    """End of one rank, or of an attempt: then that of the deciding rank.

    Args:
        kind: one of done, stopped, user_error, died.
        error: the message, for people; a user's error starts with the traceback.
        type: the exception's full name; empty when no process was left to tell.
        rank: who says so.
        step: optimizer steps taken by then, if known.
        time: when, in seconds since the epoch.
        is_refusal: whether the command was refused, and the run's records are as before.
    """

    kind: Kind
    error: str = ""
    type: str = ""
    rank: int = 0
    step: int | None = None
    time: float = field(default_factory=time.time)
    is_refusal: bool = False

    @property
    def code(self) -> int:
        """Exit code of `fit`."""
        return CODES[self.kind]

    @classmethod
    def of(cls, error: BaseException, *, rank: int = 0, step: int | None = None) -> "Outcome":
        """Return the outcome of a rank that `error` ended.

        >>> Outcome.of(StopRequested("asked to stop"), rank=1, step=7).code
        75
        """
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        return cls(_kind(error), _message(error), name, rank, step)

    def to_json(self) -> str:
        """Return the outcome as a JSON document."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "the outcome of a rank") -> "Outcome":
        """Return the outcome that `to_json` wrote; `where` names it in messages.

        Raises:
            WorldError: the text is not what `to_json` writes.
        """
        try:
            outcome = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise WorldError(f"{where} has unexpected content: {error}") from error
        kinds: dict[str, type | tuple[type, ...]] = {"error": str, "type": str, "rank": int, "time": (float, int)}
        is_right = all(isinstance(getattr(outcome, name), kind) for name, kind in kinds.items())
        if not is_right or outcome.kind not in (*CODES,) or type(outcome.step) not in (int, NoneType):
            raise WorldError(f"{where} has unexpected content: {text!r:.200}")
        return outcome


def _kind(error: BaseException) -> Kind:
    if isinstance(error, (StopRequested, StopSignal, Superseded, KeyboardInterrupt)):
        return "stopped"
    return "user_error" if isinstance(error, UserError) else "died"


def _message(error: BaseException) -> str:
    """Return our own errors' text, and others' with their origin."""
    if isinstance(error, (EngineError, StopSignal)):
        return str(error)
    return format_message("".join(traceback.format_exception(error))).rstrip()


def decide(outcomes: Sequence[Outcome], exit_code: int | None, processes: int) -> Outcome:
    r"""Return how the world of `processes` ranks ended, from their outcomes.

    An error of the user's outweighs everything, since a retry would meet it again, and so does a newer
    world. A rank without an outcome was killed, and what the others say follows from that: a lost
    connection, or a stop (a launcher asks the others to stop when one has died).

    Args:
        outcomes: those of the ranks; some can be missing.
        exit_code: the launcher's; None if it was ended by the caller, and then a stop is just that.
        processes: how many ranks there were.

    >>> decide([Outcome("done", rank=0), Outcome("done", rank=1)], 134, 2).kind
    'done'
    >>> error = decide([Outcome("died", "connection closed", "RuntimeError", rank=0, step=5)], 1, 2).error
    >>> print(error.replace(", or crashed", ",\n  or crashed"))
    rank 1 ended without a word: it was killed (out of memory, a lost machine, kill -9),
      or crashed (segmentation fault), or never started.
    rank 0 then said: connection closed
    """
    said = sorted(outcomes, key=lambda outcome: outcome.time)
    missing = sorted(set(range(processes)) - {outcome.rank for outcome in outcomes})
    if decisive := [outcome for outcome in said if outcome.kind == "user_error" or outcome.type == SUPERSEDED]:
        return decisive[0]
    if exit_code is None and (stopped := [outcome for outcome in said if outcome.kind == "stopped"]):
        return stopped[0]
    ended_early = [outcome for outcome in said if outcome.kind != "done"]
    if missing:
        return _killed(missing, ended_early, exit_code)
    return ended_early[0] if ended_early else said[0]


def _killed(missing: Sequence[int], others: Sequence[Outcome], exit_code: int | None) -> Outcome:
    ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    error = f"{ranks} ended without a word: "
    error += "it was" if len(missing) == 1 else "they were"
    error += " killed (out of memory, a lost machine, kill -9), or crashed (segmentation fault), or never started."
    if others:
        error += f"\nrank {others[0].rank} then said: {(others[0].error.splitlines() or [others[0].kind])[-1]}"
    elif exit_code is not None and exit_code > 1:
        error += f"\n{_launcher_ended(exit_code)}."
    return Outcome("died", error, rank=missing[0], step=others[0].step if others else None)


def _launcher_ended(exit_code: int) -> str:
    return f"the launcher ended with {exit_code}" + (f" (signal {exit_code - 128})" if exit_code > 128 else "")


def not_started(exit_code: int, printed: Sequence[str]) -> Outcome:
    """Return how a world ended whose launcher ended before it had started a rank.

    >>> print(not_started(2, ["error: unrecognized arguments: --no-such-option"]).error)
    the launcher ended with 2 before any rank was started
    error: unrecognized arguments: --no-such-option
    """
    return Outcome("died", "\n".join([f"{_launcher_ended(exit_code)} before any rank was started", *printed]))


def raise_for_outcome(outcome: Outcome) -> None:
    """Raise the error of the rank that decided `outcome`; return if the world is done.

    Raises:
        UserError: the job or the code is wrong; an error of the engine has its own class, such as `JobError`.
        StopRequested: the world was asked to stop.
        Superseded: a newer generation advances the run.
        WorldError: the world died. An error of the engine is the cause, with its own class, such as `StoreFull`.
    """
    if outcome.kind == "done":
        return
    base = {"user_error": UserError, "stopped": StopRequested, "died": WorldError}[outcome.kind]
    own = _engine_error(outcome.type)
    if own is None:
        raise base(outcome.error)
    if issubclass(own, (base, Superseded)):
        raise own(outcome.error)
    raise base(outcome.error) from own(outcome.error)


def _engine_error(name: str) -> type[EngineError] | None:
    """Return the error of the engine with this full name; None for any other name."""
    module, _, kind = name.rpartition(".")
    found = getattr(errors, kind, None) if module == errors.__name__ else None
    return found if isinstance(found, type) and issubclass(found, EngineError) else None
