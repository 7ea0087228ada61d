"""State in iterators and generators of random numbers."""

import copy
import functools
import itertools
import random
from collections import defaultdict, deque
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.utils.prune
from laws.objects.small import Small
from torch import Tensor

from midstride.engine import Trainer


class Iterators(Small):
    def build(self) -> None:
        self.count = itertools.count(1)
        self.rest = iter([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
        self.scaled = functools.partial(self.scale, [1.0])

    def scale(self, by: list[float], value: float) -> float:
        by[0] *= 1.5
        return by[0] * value

    def factor(self, batch: Tensor) -> Any:
        return self.scaled(next(self.count) + next(self.rest))


class Generators(Small):
    """Generators in containers, slots and children, and children that are spawned."""

    def build(self) -> None:
        self.listed = [np.random.default_rng(number) for number in range(3)]
        self.queue = deque([torch.Generator().manual_seed(1)])
        self.named = {"a": {"b": np.random.RandomState(2)}}
        self.root = np.random.default_rng(4)

    def factor(self, batch: Tensor) -> Any:
        child = self.root.spawn(1)[0]
        drawn = [self.listed[2].random(), float(torch.rand((), generator=self.queue[0])), self.named["a"]["b"].rand()]
        return 1 + sum(drawn) + child.random()


class LateGenerators(Small):
    """Generators of numpy's that training makes or replaces, over bits of other kinds; their children, too."""

    def build(self) -> None:
        self.one, self.late = np.random.default_rng(1), list[Any]()

    def factor(self, batch: Tensor) -> Any:
        if not self.late:
            self.one = np.random.Generator(np.random.SFC64(2))
            self.late = [np.random.Generator(np.random.Philox(3)), np.random.RandomState(np.random.PCG64(4))]
        philox, legacy = self.late
        return 1 + self.one.random() + philox.random() + legacy.rand() + philox.spawn(1)[0].random()


class Counted(random.Random):
    """Counts what it draws, and takes other arguments than its base class."""

    def __init__(self, *, key: int) -> None:
        super().__init__(key)
        self.drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random()


class OwnBits(np.random.Generator):
    """A generator of numpy's with a seed of its own."""

    def __init__(self, *bits: Any) -> None:
        super().__init__(np.random.Philox(5))


class LateClasses(Small):
    """Generators of the user's classes that training makes."""

    def build(self) -> None:
        self.late = list[Any]()

    def factor(self, batch: Tensor) -> Any:
        self.late = self.late or [Counted(key=3), OwnBits()]
        return 1 + sum(one.random() for one in self.late) + self.late[0].drawn


class OfFunctions(Small):
    """Generators that only a default or a method holds, and a factory that counts."""

    def build(self) -> None:
        numbers = itertools.count(1)
        self.by_default: Any = lambda generator=torch.Generator().manual_seed(1): torch.rand((), generator=generator)  # noqa: B008
        self.of_numpy, self.of_python = np.random.default_rng(1).random, random.Random(1).random
        self.gauss, self.legacy = random.Random(2).gauss, np.random.RandomState(3).rand
        self.numbered: defaultdict[int, int] = defaultdict(lambda: next(numbers))

    def factor(self, batch: Tensor) -> Any:
        drawn = [self.of_numpy(), self.of_python(), self.gauss(0, 1), self.legacy()]
        return 1 + float(self.by_default()) + sum(drawn) + self.numbered[len(self.numbered)]


GLOBAL = np.random.default_rng(11)


def from_global() -> float:
    return float(GLOBAL.random())


class OfClass(Small):
    """Generators of the class and of the file."""

    generator: ClassVar[Any] = random.Random(5)

    def factor(self, batch: Tensor) -> Any:
        return 1 + self.generator.random() + from_global()


class Teacher(Small):
    """A copy of a layer that is no submodule, and follows the weights; an average kept in a list."""

    def build(self) -> None:
        self.teachers = [copy.deepcopy(self.layer)]
        self.average = [parameter.detach().clone() for parameter in self.layer.parameters()]

    def factor(self, batch: Tensor) -> Any:
        with torch.no_grad():
            for mine, theirs in zip(self.layer.parameters(), self.teachers[0].parameters(), strict=True):
                theirs.lerp_(mine, 0.3)
            for kept, mine in zip(self.average, self.layer.parameters(), strict=True):
                kept.lerp_(mine, 0.5)
        return 1 + self.teachers[0](batch).mean().detach() + sum(kept.sum() for kept in self.average)


class Taught(Small):
    """Its teacher, in a list so that it is no layer, was trained by a Trainer of its own and goes on to change."""

    def build(self) -> None:
        teacher = Small()
        Trainer(max_steps=1, snapshots=None, enable_progress_bar=False).fit(teacher)
        self.teachers = [teacher]

    def factor(self, batch: Tensor) -> Any:
        with torch.no_grad():
            self.teachers[0].layer.weight.mul_(0.9)
            return 1 + self.teachers[0].layer(batch).mean()
