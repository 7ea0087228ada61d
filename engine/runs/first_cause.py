"""The first cause of a difference between two traces of steps. Needs no torch."""

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "Cause", "first_cause"]

#: in the order of cause: what comes first decides what comes later
KINDS = ("samples", "batch", "random state", "loss", "gradient", "optimizer state", "weight", "buffer")

#: digits of the shortest digest
_DIGEST = 32

Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Cause:
    """The first difference of two runs.

    Args:
        step: in which it is; one before the first compared step for a state that differs from the start.
        rank: whose part differs.
        kind: one of `KINDS`.
        name: of the value: a parameter's, a place in the batch.
        values: both values or digests.
        others: number of further values of this kind that differ in this step.
    """

    step: int
    rank: int
    kind: str
    name: str
    values: tuple[str, str]
    others: int = 0

    def __str__(self) -> str:
        more = f" and {self.others} more" if self.others else ""
        return f"step {self.step}, rank {self.rank}, {self.kind}: {self.name}{more} ({_in_words(*self.values)})"


def first_cause(ours: Sequence[Steps], theirs: Sequence[Steps]) -> Cause | None:
    """Return the first difference of two traces: by step, order of cause, rank; None if equal.

    Args:
        ours: the steps of each rank.
        theirs: those of the other run.
    """
    for at in range(min(map(len, (*ours, *theirs)), default=0)):
        for kind in KINDS:
            for rank, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
                if cause := _cause(mine[at], other[at], kind, rank):
                    return cause
    return None


def _cause(mine: Mapping[str, Any], other: Mapping[str, Any], kind: str, rank: int) -> Cause | None:
    ours, theirs = mine.get(kind, {}), other.get(kind, {})
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    values = ours.get(names[0], "nothing"), theirs.get(names[0], "nothing")
    return Cause(mine["step"], rank, kind, names[0], values, len(names) - 1)


def _in_words(ours: str, theirs: str) -> str:
    """Return both values; of two lists of samples the first that differ."""
    with suppress(ValueError, SyntaxError):
        lists = ast.literal_eval(ours), ast.literal_eval(theirs)
        if all(isinstance(one, list | tuple) for one in lists) and len(lists[0]) == len(lists[1]):
            at = next(at for at, (a, b) in enumerate(zip(*lists, strict=True)) if a != b)
            return f"at place {at}: {lists[0][at]!r}, and {lists[1][at]!r}"
    is_digest = len(ours) == len(theirs) and len(ours) >= _DIGEST and ours.isalnum()
    return "other content" if is_digest else f"{ours:.60}, and {theirs:.60}"
