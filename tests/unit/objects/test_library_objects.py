"""Objects of libraries are compared between snapshots where their attributes are all that they hold."""

import io
import selectors
import textwrap
import threading
import weakref
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.kinds.library_objects import is_comparable


def _wrapper(**attributes: Any) -> textwrap.TextWrapper:
    wrapper = textwrap.TextWrapper()
    vars(wrapper).update(attributes)
    return wrapper


class Users:
    """An object of the user's, which other parts of the state may hold."""


COMPARED: dict[str, Any] = {
    "numbers and text": 1.5,
    "arrays": [np.zeros(2), torch.zeros(2)],
    "generators": [np.random.default_rng(3), torch.Generator()],
    "code": [len, textwrap.dedent, int, dict[str, int], int | None],
    "containers": {"a": [(1, {2})], "b": defaultdict(list, x=[1])},
    "other objects": SimpleNamespace(a=textwrap.TextWrapper()),
}
NOT_COMPARED: dict[str, Any] = {
    "a lock": threading.Lock(),
    "a file": io.StringIO(),
    "what can be closed": selectors.SelectSelector(),
    "an iterator": iter({1: 2}),
    "a weak reference": weakref.ref(Users),
    "a module": nn.Linear(1, 1),
    "a weight": [nn.Parameter(torch.zeros(1))],
    "an object of the user's": [Users()],
    "more items than a digest shows": [[0]] * 1001,
    "objects in a set": {textwrap.TextWrapper()},
    "a container with attributes of its own": Counter(),
    "what is deeper than a digest shows": [[[[[[0]]]]]],
}


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in COMPARED.items()])
def test_what_a_digest_tells_is_compared(value: Any) -> None:
    assert is_comparable(_wrapper(held=value), {})


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in NOT_COMPARED.items()])
def test_what_it_does_not_tell_is_not(value: Any) -> None:
    assert not is_comparable(_wrapper(held=value), {})


def test_what_other_parts_of_the_state_hold_is_not_compared() -> None:
    buffer = torch.zeros(1)
    assert not is_comparable(_wrapper(held=buffer), {id(buffer)})
    assert is_comparable(_wrapper(held=buffer), {})


def test_a_change_of_what_is_compared_is_in_the_digest() -> None:
    before = {name: digest_lines("x", _wrapper(held=value)) for name, value in COMPARED.items()}
    COMPARED["containers"]["a"][0][1].add(3)
    COMPARED["generators"][0].random()
    changed = [name for name, value in COMPARED.items() if digest_lines("x", _wrapper(held=value)) != before[name]]
    assert changed == ["generators", "containers"]
