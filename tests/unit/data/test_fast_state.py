"""Generators read and put back where their words stand: to the last bit, and as well where they have to be asked."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from midstride.engine.data.rng import fast_state
from midstride.engine.data.rng.fast_state import (
    RngReading,
    read_rng,
    restore_numpy,
    restore_random,
    restore_torch,
    rng_changed,
    seed_generators,
)
from midstride.engine.seeds import Generators
from midstride.engine.state.differences import differences

#: what draws -> which of torch, numpy and `random` is moved by it
DRAWS: dict[str, tuple[Callable[[], object], list[bool]]] = {
    "nothing": (lambda: None, [False, False, False]),
    "torch": (lambda: torch.rand(()), [True, False, False]),
    "torch's normal numbers": (lambda: torch.randn(()), [True, False, False]),
    "so many that torch's words are new": (lambda: torch.rand(624), [True, False, False]),
    "numpy": (lambda: np.random.random(), [False, True, False]),
    "random": (random.random, [False, False, True]),
    "random's normal numbers": (lambda: random.gauss(0.0, 1.0), [False, False, True]),
}


def put_back(seen: RngReading) -> None:
    restore_torch(seen[0])
    assert restore_numpy(seen[1])
    restore_random(seen[2])


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_is_seen_and_put_back(name: str) -> None:
    draw, expected = DRAWS[name]
    np.random.seed(1)  # no normal number of numpy waits: that is not for a look to see
    for _ in range(2):  # the second normal number was made with the first
        before, seen = Generators().state_dict(), read_rng()
        draw()
        after = Generators().state_dict()
        assert rng_changed(seen, read_rng()) == expected
        put_back(seen)
        assert not differences(before, Generators().state_dict())
        draw()
        assert not differences(after, Generators().state_dict())


@pytest.mark.parametrize("seed", [np.random.seed, seed_generators])
def test_no_normal_number_of_numpy_waits_when_it_is_put_back(seed: Callable[[int], None]) -> None:
    seen = read_rng()
    seed(1)
    np.random.normal()
    put_back(seen)
    assert not np.random.get_state(legacy=False)["has_gauss"]


def test_the_second_normal_number_of_numpy_is_kept() -> None:
    np.random.seed(1)
    np.random.normal()
    state, second = Generators().state_dict(), np.random.normal()
    np.random.seed(2)
    Generators().load_state_dict(state)
    assert np.random.normal() == second


def test_a_layout_that_is_not_known_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    assert not isinstance(fast_state.torch_state(generator), fast_state.StateAccessor), (
        "torch keeps its state elsewhere"
    )
    assert not isinstance(fast_state.random_state(), fast_state.StateAccessor), "Python keeps its state elsewhere"
    monkeypatch.setattr(fast_state, "_state_offset", lambda _: None)
    asked = fast_state.torch_state(generator)
    assert isinstance(asked, fast_state.StateAccessor)
    seen = asked.raw
    first = torch.rand(3, generator=generator)
    assert asked.raw != seen
    asked.raw = seen
    assert torch.equal(torch.rand(3, generator=generator), first)


@pytest.mark.parametrize(
    ("start", "end"), [(13, 16), (2516, 2520), (2520, 2524), (2525, 2528), (2528, 2536), (2537, 2544)]
)
def test_equal_states_of_torch_read_alike_whatever_lies_in_unused_memory(start: int, end: int) -> None:
    torch.manual_seed(3)
    before = fast_state.read_rng()[0]
    memory: Any = fast_state._torch_words._memory
    for garbage in (b"\x4f\xa8\x0b\x01\x33\x5c\x02\x71", bytes(8)):
        memory[start:end] = garbage[: end - start]
        assert torch.equal(torch.get_rng_state(), torch.default_generator.get_state())
        assert fast_state.read_rng()[0] == before


def test_a_cached_normal_number_is_part_of_the_state() -> None:
    torch.manual_seed(3)
    torch.randn(1)
    state = torch.get_rng_state()
    reading, second = fast_state.read_rng()[0], torch.randn(1)
    torch.randn(3)
    fast_state.restore_torch(reading)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.randn(1), second)
