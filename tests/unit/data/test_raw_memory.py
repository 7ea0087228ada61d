"""Generators read and put back where their words stand: to the last bit, and as well where they have to be asked."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from midstride.engine.data.rng import raw_memory as words
from midstride.engine.data.rng.fast_state import Peeks, moved, peeks, put_back_numpy, put_back_random, put_back_torch
from midstride.engine.seeds import Generators
from midstride.engine.state.codec import differences

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


def put_back(seen: Peeks) -> None:
    put_back_torch(seen[0])
    assert put_back_numpy(seen[1])
    put_back_random(seen[2])


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_is_seen_and_put_back(name: str) -> None:
    draw, expected = DRAWS[name]
    np.random.seed(1)  # no normal number of numpy waits: that is not for a look to see
    for _ in range(2):  # the second normal number was made with the first
        before, seen = Generators().state_dict(), peeks()
        draw()
        after = Generators().state_dict()
        assert moved(seen, peeks()) == expected
        put_back(seen)
        assert not differences(before, Generators().state_dict())
        draw()
        assert not differences(after, Generators().state_dict())


def test_a_layout_that_is_not_known_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    assert not isinstance(words.torch_words(generator), words.Asked), "torch keeps its words elsewhere: looks are slow"
    assert not isinstance(words.random_words(), words.Asked), "Python keeps its words elsewhere: looks are slow"
    monkeypatch.setattr(words, "_place_of_words", lambda _: None)
    asked = words.torch_words(generator)
    assert isinstance(asked, words.Asked)
    seen = asked.raw
    first = torch.rand(3, generator=generator)
    assert asked.raw != seen
    asked.raw = seen
    assert torch.equal(torch.rand(3, generator=generator), first)
