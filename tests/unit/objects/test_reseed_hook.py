"""What a method `reseed(seed)` sets is found by calling it, and put back."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from midstride.engine.objects.generator_search import ReseedHook
from midstride.engine.objects.kinds.generators import MAIN_GENERATORS, get_state
from midstride.engine.state.differences import differences


class Hooked:
    """Has a hook, and numbers that are drawn from what that seeds."""

    def __init__(self) -> None:
        self.calls = 0
        self.prepare()

    def prepare(self) -> None:
        """Make what the hook seeds."""

    def numbers(self) -> list[float]:
        self.calls += 1
        return [self.draw() for _ in range(3)]

    def draw(self) -> float:
        raise NotImplementedError


class Replaced(Hooked):
    def prepare(self) -> None:
        self.stream: Iterator[float] = iter([0.5] * 9)

    def reseed(self, seed: int) -> None:
        self.stream = iter([seed / 7] * 9)

    def draw(self) -> float:
        return next(self.stream)


class InPlace(Hooked):
    def prepare(self) -> None:
        self.generator = random.Random(1)

    def reseed(self, seed: int) -> None:
        self.generator.seed(seed)

    def draw(self) -> float:
        return self.generator.random()


class Late(Hooked):
    """Has nothing before it is seeded."""

    __slots__ = ("generator",)

    def reseed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def draw(self) -> float:
        return float(self.generator.random()) if hasattr(self, "generator") else -1.0


class Transform:
    def __init__(self) -> None:
        self.number, self.generator = 3, torch.Generator().manual_seed(3)


class Within(Hooked):
    """Seeds what another object holds."""

    def prepare(self) -> None:
        self.transforms = [Transform()]

    def reseed(self, seed: int) -> None:
        self.transforms[0].number = seed % 11
        self.transforms[0].generator.manual_seed(seed)

    def draw(self) -> float:
        return self.transforms[0].number + float(torch.rand((), generator=self.transforms[0].generator))


class OfAll(InPlace):
    """Seeds the main generators as well."""

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


class Failing(InPlace):
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        raise ValueError("not today")


def main_states() -> list[Any]:
    return [*map(get_state, MAIN_GENERATORS)]


@pytest.mark.parametrize("kind", [Replaced, InPlace, Late, Within, OfAll, Failing])
def test_what_a_hook_sets_is_put_back_and_nothing_else(kind: Callable[[], Any]) -> None:
    expected, main = kind().numbers(), main_states()
    owner = kind()
    hook = ReseedHook(owner)
    assert not differences(main, main_states())
    stood = hook.getstate()
    for seed in (5, 8):
        with suppress(ValueError):
            owner.reseed(seed)
        assert owner.numbers() != expected
    hook.setstate(stood)
    assert owner.numbers() == expected
    assert owner.calls == 3
