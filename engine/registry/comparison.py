"""Compares challenger and champion: the challenger must be better by more than the margin."""

import math
from typing import Literal

from pydantic import Field

from midstride.engine.config.options import Record
from midstride.engine.errors import JobError
from midstride.engine.formatting import format_number

__all__ = ["PromotionDecision", "compare", "missing_metric"]


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


def _value(values: dict[str, float], metric: str) -> float:
    if faults := missing_metric(values, metric):
        raise JobError(faults[0])
    return values[metric]


def missing_metric(values: dict[str, float], metric: str) -> list[str]:
    """Return a message that a test did not log `metric`; nothing if it did."""
    if metric in values:
        return []
    there = f"it logs {', '.join(sorted(values))}" if values else "it logs nothing: write test_step and test_dataloader"
    return [f"nightly.metric: the test logs no {metric}; {there}"]
