"""What a digest tells apart: code, iterators, and objects of libraries, compared where it tells all of them."""

import io
import itertools
import operator
import selectors
import textwrap
import threading
import weakref
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from midstride.engine.objects.digest import digest_lines, users_lines
from midstride.engine.objects.kinds.library_objects import is_comparable
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import Root
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences


class Shape:
    def area(self) -> int:
        return 1

    def rim(self) -> int:
        return 2


SHAPE = Shape()
PAIRS: dict[str, tuple[Any, Any]] = {
    "a class": (nn.ReLU, nn.GELU),
    "a built-in": (max, min),
    "one of torch's": (torch.relu, torch.tanh),
    "one of Python": (nn.functional.relu, nn.functional.gelu),
    "one of numpy's": (np.add, np.multiply),
    "one of a class": (str.upper, str.lower),
    "a method": (SHAPE.area, SHAPE.rim),
    "what a partial calls": (partial(max, 1), partial(min, 1)),
    "what it gives": (partial(max, 1), partial(max, 2)),
    "a method that a partial calls": (partial(SHAPE.area), partial(SHAPE.rim)),
    "a getter": (operator.itemgetter(1), operator.itemgetter(2)),
    "a module": (torch.nn, torch.optim),
    "a dtype": (torch.float32, torch.float16),
    "a device": (torch.device("cpu"), torch.device("meta")),
    "one of numpy": (np.dtype("f4"), np.dtype("f8")),
    "a generic": (list[int], list[str]),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("lines", [digest_lines, users_lines])
def test_another_function_class_or_type_is_seen(lines: Any, kind: str) -> None:
    one, other = (lines("global", {"act": value}) for value in PAIRS[kind])
    assert one == lines("global", {"act": PAIRS[kind][0]})
    assert one != other


def objects_of(held: list[Any]) -> Objects:
    root = Root("module", "", {"held": held})
    return Objects(nn.Module(), lambda members, quiet: iter([root]), lambda members: {}, torch.device("cpu"))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("items", [1, 2, 3])
def test_a_cycle_is_in_the_same_place_in_every_life(items: int, count: int) -> None:
    undisturbed, killed = ([itertools.cycle(["a", "b", "c"][:items])] for _ in range(2))
    for _ in range(9):
        read = [list(itertools.islice(held[0], count)) for held in (undisturbed, killed)]
        assert read[0] == read[1]
        saved, killed = encode(objects_of(killed).state_dict()), [itertools.cycle(["a", "b", "c"][:items])]
        objects_of(killed).load_state_dict(decode(saved.document, saved.tensors))
        assert differences(objects_of(killed).state_dict(), objects_of(undisturbed).state_dict()) == []


def test_an_iterator_is_described_by_its_remaining_items() -> None:
    left = iter([1, 2, 3])
    lines = {"held holds": "'2 items'", "held[0]": "3 items left", "held[1]": "builtins:list_iterator"}
    assert digest_lines("held", [left, type(left)]) == lines


def test_an_iterator_without_end_is_told_by_what_it_repeats() -> None:
    told = digest_lines("held", [itertools.repeat(2.0)])
    assert told == {"held holds": "'1 items'", "held[0] (0) holds": "'1 items'", "held[0] (0)[0]": "2.0"}


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
