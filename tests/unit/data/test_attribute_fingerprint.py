"""What a quick fingerprint shows of attributes: where anything has changed, it never says that nothing has."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from midstride.engine.data.attribute_fingerprint import AttributeFingerprint

pytestmark = pytest.mark.fast


class Held:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 1


class Counted(list[int]):
    pass


def shown(number: int, scale: float = 1.0) -> float:
    return number * scale


def counter() -> Callable[[], None]:
    count = [0]

    def call() -> None:
        count[0] += 1

    return call


#: what an owner holds -> how training changes it
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "a number": (lambda: 1, lambda own: own.update(value=2)),
    "another attribute": (lambda: 1, lambda own: own.update(more=2)),
    "one less": (lambda: 1, lambda own: own.pop("value")),
    "a list": (lambda: [1, 2], lambda own: own["value"].append(3)),
    "an item": (lambda: [1, 2], lambda own: own["value"].__setitem__(0, 3)),
    "the order of a dict": (lambda: {1: 1, 2: 2}, lambda own: own["value"].update({1: own["value"].pop(1)})),
    "a list in a tuple": (lambda: ({"a": [1]},), lambda own: own["value"][0]["a"].clear()),
    "an object": (lambda: Held(level=1), lambda own: vars(own["value"]).update(level=2)),
    "an object in it": (lambda: Held(inner=Held(level=1)), lambda own: setattr(own["value"].inner, "level", 2)),
    "a slot": (Slotted, lambda own: setattr(own["value"], "level", 2)),
    "a class": (Held, lambda own: setattr(own["value"], "__class__", type("Other", (Held,), {}))),
    "a large list that is cut": (lambda: [*range(2000)], lambda own: own["value"].__delitem__(slice(10, None))),
    "an attribute of a function": (lambda: plain_function(), lambda own: setattr(own["value"], "seen", 1)),
    "a small tensor": (lambda: [torch.zeros(3)], lambda own: own["value"][0].data.add_(1)),
    "an array": (lambda: Held(rows=np.zeros(3)), lambda own: own["value"].rows.__setitem__(1, 1)),
    "beside a circle": (lambda: circle(), lambda own: own["value"][0].append(1)),
}
#: what can change and stay the object that it is, with nothing that identity shows
NEVER_TOLD: dict[str, Callable[[], Any]] = {
    "a bytearray": lambda: bytearray(b"x"),
    "a set": lambda: {1},
    "a list of a class of its own": lambda: Counted([1]),
    "an object of a library": lambda: torch.Generator(),
    "a function with a cell": counter,
    "a function with a default": lambda: shown,
}


def plain_function() -> Callable[[int], int]:
    def double(number: int) -> int:
        return 2 * number

    return double


def circle() -> list[Any]:
    items: list[Any] = [[]]
    items.append(items)
    return items


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_not_said_to_be_as_it_was(name: str) -> None:
    make, change = CHANGES[name]
    own = {"value": make(), "other": "text"}
    fingerprint = AttributeFingerprint({"data": (owner := Held(), own)})
    assert fingerprint.is_same({"data": (owner, own)})
    assert fingerprint.is_same({"data": (owner, dict(own))})
    change(own)
    assert not fingerprint.is_same({"data": (owner, own)})
    assert not fingerprint.is_same({})


@pytest.mark.parametrize("name", NEVER_TOLD)
def test_of_what_changes_unseen_nothing_is_said(name: str) -> None:
    own = {"value": NEVER_TOLD[name]()}
    for held in (own, {"value": [own]}):
        owners = {"data": (Held(), held)}
        assert not AttributeFingerprint(owners).is_same(owners)
