"""Tables of cases: the whole product of some axes, or a seeded cover of it in which every pair of values appears."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return every combination of values."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def cover(axes: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[Case]:
    """Return few cases in which every pair of values of any two axes appears together.

    Greedy: each case takes, of some random ones around a pair not yet seen, that with the most new pairs.
    """
    draw = random.Random(seed)
    unseen = {pair for a, b in itertools.combinations(axes, 2) for pair in _between(axes, a, b)}
    cases: list[Case] = []
    while unseen:
        (a, x), (b, y) = draw.choice(sorted(unseen, key=repr))
        tries = [{name: draw.choice(values) for name, values in axes.items()} | {a: x, b: y} for _ in range(30)]
        best = max(tries, key=lambda case: len(_pairs(case) & unseen))
        unseen -= _pairs(best)
        cases.append(best)
    return cases


def _between(axes: Mapping[str, Sequence[Any]], a: str, b: str) -> list[Any]:
    return [((a, x), (b, y)) for x in axes[a] for y in axes[b]]


def _pairs(case: Case) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))
