"""Tests of the values that functions hold: in closures, partials, bound and dispatching methods."""

from collections.abc import Callable
from functools import partial, reduce, singledispatchmethod
from typing import Any

import torch

from midstride.engine.objects.roots import class_and_global_state


class Owner:
    """A class of this file, whose functions are told."""

    @singledispatchmethod
    def dispatched(self, x: object) -> int:
        return 0


class Clock:
    """What a global function is bound to."""

    def tick(self) -> None:
        """Do nothing."""


def add(seen: list[int], *, more: dict[str, int]) -> None:
    seen.append(len(more))


counts: tuple[list[int], dict[str, int]] = ([], {})
bound = partial(add, counts[0], more=counts[1])
tick = Clock().tick


@torch.no_grad()
def decorated(x: Any) -> Any:
    return x


def memo(function: Callable[[int], int]) -> Callable[[int], int]:
    cache: dict[int, int] = {}

    def kept(x: int) -> int:
        return cache.setdefault(x, function(x))

    return kept


@memo
def kept_in_dict(x: int) -> int:
    return x


def wrapped(inner: Callable[[], int], seen: list[int]) -> Callable[[], int]:
    return lambda: inner() + len(seen)


chain: Callable[[], int] = reduce(wrapped, ([number] for number in range(2000)), lambda: 0)


def test_data_alone_are_told_of_functions_in_closures() -> None:
    told = {name for name, _ in class_and_global_state([Owner()]) if name.startswith("function ")}
    assert not any(name.startswith("function decorated") for name in told)
    assert "function memo.<locals>.kept: cache" in told
    assert not any(name.endswith(": function") for name in told)


def test_a_long_chain_of_closures_is_followed_to_a_depth() -> None:
    told = [name for name, _ in class_and_global_state([Owner()]) if name.startswith("function wrapped.")]
    assert max(name.count(": inner") for name in told) == 4


def test_what_partials_bound_and_dispatching_methods_hold_is_told() -> None:
    told = dict(class_and_global_state([Owner()]))
    assert told[f"global {__name__}.bound: argument 0"] is counts[0]
    assert told[f"global {__name__}.bound: argument more"] is counts[1]
    assert told[f"global {__name__}.tick: object"] is tick.__self__
    assert "function Owner.dispatched: dispatch: registry" in told
