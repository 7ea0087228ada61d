"""Functions that training chooses, moves and makes."""

import types
import weakref
from functools import partial, singledispatch, wraps
from typing import Any

import numpy as np
from laws.objects.small import Small
from support.libraries import library
from torch import Tensor

augment = library("augment")


def soft(value: float) -> float:
    return value


def hard(value: float) -> float:
    return 3 * value


class Chooses(Small):
    """Another function of the file is taken, and those of a list and of a dict change places."""

    def build(self) -> None:
        def five() -> float:
            return 5.0

        self.count = 0
        self.acts = [self.one, self.two, lambda: self.count * 0.2]
        self.by_name: dict[str, Any] = {"now": self.one, "then": five}
        self.act: Any = soft

    def one(self) -> float:
        self.count += 1
        return self.count

    def two(self) -> float:
        return self.count * 0.5

    def factor(self, batch: Tensor) -> Any:
        self.acts.append(self.acts.pop(0))
        names = "now", "then"
        self.by_name.update(zip(names, [self.by_name[name] for name in reversed(names)], strict=True))
        self.act = hard
        return self.act(self.acts[0]() + self.by_name["now"]())


class ChoosesLambdas(Small):
    """Functions of one name change places: two lambdas, two that are made by another."""

    def build(self) -> None:
        self.act, self.other = (lambda: 1.0), (lambda: 3.0)
        self.by_name = {"now": times(2.0), "then": times(5.0)}
        self.late: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.act, self.other = self.other, self.act
        self.by_name["now"] = self.by_name["then"]
        self.late = self.late or self.other
        return self.by_name["now"](self.act() + self.late())


def times(factor: float) -> Any:
    if factor > 4:
        return lambda value: value * factor + 1
    return lambda value: value * factor


class ChoosesLate(Small):
    """A lambda is made in training that has the name of one that was built."""

    warns = r"set in training to .* module\.act \(now \S+:times.<locals>.<lambda>, of other code\)"

    def build(self) -> None:
        self.act = times(2.0)

    def factor(self, batch: Tensor) -> Any:
        self.act = times(5.0)
        return self.act(1.0)


class Act:
    """Its class gives objects another module."""

    __module__: Any = property(lambda self: "elsewhere")  # type: ignore[assignment]

    def __init__(self, act: Any) -> None:
        self.act, self.steps = act, 0

    def step(self) -> Any:
        self.steps += 1
        return self.act(self.steps)


class ClosesLate(Small):
    """An object that is made in training holds another closure of a function that was built."""

    warns = r"set in training to .* module\.late\.act \(now \S+:times.<locals>.<lambda>, of other code\)"

    def build(self) -> None:
        self.act, self.late = times(2.0), None

    def factor(self, batch: Tensor) -> Any:
        self.late: Any = self.late or Act(times(3.0))
        return self.act(self.late.step())


class NamesItsModule(Small):
    """Classes whose `__module__` is no text."""

    def build(self) -> None:
        self.act, self.late = Act(soft), None

    def factor(self, batch: Tensor) -> Any:
        self.late: Any = self.late or Act(hard)
        return self.act.step() + self.late.step()


@singledispatch
def told(value: Any) -> float:
    return 1.0


class Registers(Small):
    """A function of a library's decorator gets another implementation."""

    warns = r"part of no snapshot: function told: dispatch: registry holds \('1 items', now '2 items'\)"

    def factor(self, batch: Tensor) -> Any:
        told.register(int)(hard)
        return told(2)


def counter() -> Any:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return lambda: count()


count_inside = counter()


class CountsInside(Small):
    """A function in the closure of a global one counts."""

    warns = r"changed in training, and is part of no snapshot: .*: count: number \(0, now 1\)"

    def factor(self, batch: Tensor) -> Any:
        return count_inside()


class Appends(Small):
    """A list gets another function at every step."""

    warns = r"set in training to .* module\.acts\.0 \(now "

    def build(self) -> None:
        self.acts: list[Any] = []

    def factor(self, batch: Tensor) -> Any:
        self.acts.append(lambda: 1.0)
        return len(self.acts)


class Patched(Small):
    """An object gets a method of its own."""

    warns = r"set in training to .* module\.gain \(now .*Patched\.factor"

    def factor(self, batch: Tensor) -> Any:
        self.gain = types.MethodType(lambda self: 2.0, self)
        return self.gain()

    def gain(self) -> float:
        return 1.0


class Linked(Small):
    """A list that is linked, as long as training."""

    warns = r"nested deeper than 64 levels; deeper parts are in no snapshot: module\.newest\.1\.1"

    def build(self) -> None:
        self.newest: Any = None
        for number in range(2000):
            self.newest = (number, self.newest)

    def factor(self, batch: Tensor) -> Any:
        self.newest = (float(batch.sum()), self.newest)
        return 1.0


def scaled(by: list[float]) -> float:
    by.append(by[-1] * 1.1)
    return sum(by)


class Counter(partial[float]):
    calls = 0

    def __call__(self, /, *arguments: Any, **named: Any) -> float:
        self.calls += 1
        return super().__call__(*arguments, **named) * self.calls


class Partials(Small):
    """Attributes of a partial, and a class derived from it; one that is new."""

    def build(self) -> None:
        self.plain, self.counter = partial(scaled, [1.0]), Counter(scaled, [2.0])
        self.plain.calls = 0
        self.late: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.plain.calls += 1
        self.late = self.late or Counter(scaled, [3.0])
        return self.plain() * self.plain.calls + self.counter() + self.late()


class Node:
    def __init__(self, value: float) -> None:
        self.value = value


class Weak(Small):
    """Weak references: to another object, to one that is gone, and one that is new."""

    def build(self) -> None:
        self.nodes = [Node(1.0), Node(2.0), Node(3.0)]
        self.newest, self.last = weakref.ref(self.nodes[0]), weakref.ref(self.nodes[2])
        self.late: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.newest = weakref.ref(self.nodes[1])
        self.late = weakref.ref(self.nodes[0])
        del self.nodes[2:]
        found: Any = self.newest()
        found.value *= 1.1
        self.late().value += 1
        return found.value + self.nodes[0].value + (self.last() is None)


def counted(function: Any) -> Any:
    @wraps(function)
    def wrapped(value: float) -> Any:
        wrapped.calls += 1
        return function(value) * wrapped.calls

    wrapped.calls = 0
    return wrapped


class Counts(Small):
    """Functions that objects hold have attributes."""

    def build(self) -> None:
        self.act, self.decorated = (lambda value: value), counted(soft)
        self.act.gain = 1.0

    def factor(self, batch: Tensor) -> Any:
        self.act.gain *= 1.1
        return self.decorated(self.act(self.act.gain))


class Bends(Small):
    """What is called is an object of a library."""

    def build(self) -> None:
        self.curve = np.poly1d([1.0, 0.0])

    def factor(self, batch: Tensor) -> Any:
        self.curve = self.curve + np.poly1d([0.1])
        return float(self.curve(1.0))


class Fits(Small):
    """What is called is an object of a library that shows no array."""

    def build(self) -> None:
        self.curve: Any = np.polynomial.Polynomial([0.0, 1.0])

    def factor(self, batch: Tensor) -> Any:
        self.curve = self.curve + 0.1
        return float(self.curve(1.0))


class FitsAlone(Small):
    """What is called is an object of a library that pickle refuses."""

    warns = r"part of no snapshot: module\.curve\.slope \(1\.0, now 1\.1\)"

    def build(self) -> None:
        self.curve = augment.Curve()

    def factor(self, batch: Tensor) -> Any:
        self.curve.slope += 0.1
        return self.curve(1.0)


class WeakWithCallback(Small):
    """A weak reference that calls something when what it refers to is gone."""

    warns = "attribute newest, a ReferenceType, is not part of snapshots"

    def build(self) -> None:
        self.nodes = [Node(1.0), Node(2.0)]
        self.newest = weakref.ref(self.nodes[0], id)

    def factor(self, batch: Tensor) -> Any:
        self.newest = weakref.ref(self.nodes[1], id)
        found: Any = self.newest()
        return found.value


class InOwnModule(Small):
    """A module that code makes, to keep values in."""

    warns = "attribute space, a module, is not part of snapshots"

    def build(self) -> None:
        self.space: Any = types.ModuleType("space")
        self.space.step = 0

    def factor(self, batch: Tensor) -> Any:
        self.space.step += 1
        return self.space.step


class WeakProxy(Small):
    """A weak proxy whose object is gone by the first snapshot."""

    def build(self) -> None:
        self.nodes = [Node(1.0)]
        self.newest = weakref.proxy(self.nodes[0])

    def factor(self, batch: Tensor) -> Any:
        self.nodes.clear()
        return 1.0
