"""Compares challenger and champion.

The challenger must be better by more than the margin, and pass all gates.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from midstride.engine.config.options import GateOptions, Record
from midstride.engine.errors import JobError
from midstride.engine.formatting import format_number

__all__ = ["PromotionDecision", "compare", "missing_metric", "with_gates"]


class PromotionDecision(Record):
    """Decision of a night."""

    promoted: bool
    why: str = Field(description="A sentence with both values.")
    metric: str = Field(description="Name of the deciding value.")
    mode: Literal["min", "max"] = Field(description="min or max: the better of two values.")
    margin: float = Field(description="Required difference.")
    challenger: dict[str, float] = Field(description="Test results of the challenger.")
    champion: dict[str, float] = Field({}, description="Test results of the champion.")
    over: int | None = Field(None, description="Number of the compared champion, if any.")
    gates: Annotated[tuple[str, ...], Field(description="Each limit with the value, and whether it holds.")] = ()
    failed_gates: Annotated[tuple[str, ...], Field(description="Those of them that do not hold.")] = ()


def compare(
    challenger: dict[str, float],
    champion: dict[str, float] | None,
    *,
    metric: str,
    mode: Literal["min", "max"],
    margin: float = 0.0,
    over: int | None = None,
) -> PromotionDecision:
    """Compare two tests on the same data.

    >>> compare({"acc": 0.93}, {"acc": 0.91}, metric="acc", mode="max", margin=0.01).why
    'acc 0.93 against 0.91: better by 0.02, more than the margin of 0.01'

    Args:
        challenger: its values by name.
        champion: its values; None if there is no champion yet.
        metric: name of the value that decides.
        mode: whether smaller or larger is better.
        margin: by how much, in units of the metric.
        over: number of the champion.

    Raises:
        JobError: the test did not log the metric.
    """
    new, old = _value(challenger, metric), None if champion is None else _value(champion, metric)
    promoted, why = _judge(new, old, mode, margin)
    return PromotionDecision(
        promoted=promoted,
        why=f"{metric} {format_number(new)}{'' if old is None else f' against {format_number(old)}'}: {why}",
        metric=metric,
        mode=mode,
        margin=margin,
        challenger=challenger,
        champion=champion or {},
        over=over,
    )


def with_gates(decision: PromotionDecision, gates: Mapping[str, GateOptions]) -> PromotionDecision:
    """Return `decision` after `gates`: a challenger that fails a limit is not promoted.

    >>> better = compare({"acc": 0.93}, {"acc": 0.91}, metric="acc", mode="max")
    >>> with_gates(better, {"acc": GateOptions(min=0.95)}).why
    'acc 0.93 against 0.91: better by 0.02, more than the margin of 0, but acc 0.93 fails min 0.95'

    Args:
        decision: of `compare`.
        gates: limits by the name of a test value.

    Raises:
        JobError: the test did not log the value of a gate.
    """
    tried = [
        limit
        for name, gate in gates.items()
        for limit in _limits(
            name, gate, _value(decision.challenger, name, "nightly.gates"), decision.champion.get(name)
        )
    ]
    failed = tuple(words for words, holds in tried if not holds)
    why = decision.why
    if failed:
        why += f"{', but' if decision.promoted else '; and'} {'; '.join(failed)}"
    gated = {"gates": tuple(words for words, _ in tried), "failed_gates": failed}
    return decision.model_copy(update={**gated, "promoted": decision.promoted and not failed, "why": why})


def _judge(new: float, old: float | None, mode: Literal["min", "max"], margin: float) -> tuple[bool, str]:
    if not math.isfinite(new):
        return False, "not finite"
    if old is None:
        return True, "the first champion"
    if not math.isfinite(old):
        return True, "the champion's is not finite"
    gain = new - old if mode == "max" else old - new
    if gain <= 0:
        return False, f"worse by {format_number(-gain)}" if gain else "not better"
    if gain <= margin:
        return False, f"better by {format_number(gain)}, not more than the margin of {format_number(margin)}"
    return True, f"better by {format_number(gain)}, more than the margin of {format_number(margin)}"


def _limits(name: str, gate: GateOptions, new: float, old: float | None) -> list[tuple[str, bool]]:
    """Return each limit of `gate` with the value, and whether it holds.

    Without a champion's value, `max_drop` and `max_rise` set none.
    """
    reference = None if old is None or not math.isfinite(old) else old
    against = "" if reference is None else f"; the champion has {format_number(reference)}"
    limits: list[tuple[str, float | None, float | None, int, str]] = [
        ("min", gate.min, 0.0, 1, ""),
        ("max", gate.max, 0.0, -1, ""),
        ("max_drop", gate.max_drop, reference, 1, against),
        ("max_rise", gate.max_rise, reference, -1, against),
    ]
    tried = []
    for option, given, origin, sign, remark in limits:
        if given is None or origin is None:
            continue
        bound = given if not remark else origin - sign * given
        holds = math.isfinite(new) and sign * (new - bound) >= 0
        words = f"{name} {format_number(new)} {'keeps' if holds else 'fails'} {option} {format_number(given)}{remark}"
        tried.append((words, holds))
    return tried


def _value(values: dict[str, float], metric: str, key: str = "nightly.metric") -> float:
    if faults := missing_metric(values, metric, key):
        raise JobError(faults[0])
    return values[metric]


def missing_metric(values: dict[str, float], metric: str, key: str = "nightly.metric") -> list[str]:
    """Return a message that a test did not log `metric`, named by `key`; nothing if it did."""
    if metric in values:
        return []
    there = f"it logs {', '.join(sorted(values))}" if values else "it logs nothing: write test_step and test_dataloader"
    return [f"{key}: the test logs no {metric}; {there}"]
