"""State in values of classes that are derived from Python's own, and in gradients of plain tensors."""

import ctypes
import enum
import queue
import random
import re
from collections import OrderedDict, deque
from datetime import UTC, date, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from laws.objects.small import Small
from torch import Tensor


class Share(enum.Flag):
    HEAD = 1
    BODY = 2
    TAIL = 4


class Steps(int):
    """A number of the user's own."""


class Name(str):
    """A text of the user's own, with an attribute."""

    __slots__ = ("__dict__",)


class Members(frozenset[int]):
    """A set of the user's own."""


class Recent(deque[float]):
    """A deque of the user's own."""


class Ranking(OrderedDict[str, float]):
    """A dict of the user's own, whose order can be changed."""


class CountingRandom(random.Random):
    """A generator with an attribute."""

    draws = 0

    def draw(self) -> float:
        self.draws += 1
        return self.draws * self.random()


class Derived(Small):
    """Values of classes derived from Python's own, and combined flags."""

    def build(self) -> None:
        self.share, self.steps, self.text, self.members = Share.HEAD, Steps(1), Name("a"), Members([1])
        self.recent, self.ranking, self.random = Recent([1.0], 2), Ranking(a=1.0, b=2.0, c=3.0), CountingRandom(3)

    def factor(self, batch: Tensor) -> Any:
        self.share = Share((self.share.value * 3 + 1) % 8)
        self.steps = Steps(self.steps + 1)
        length = len(self.text)
        self.text = Name(self.text + "b")
        self.text.seen = length
        self.members = Members([*self.members, 8 * len(self.members)])
        self.recent = Recent([*self.recent, float(self.steps)], (self.recent.maxlen or 0) + 1)
        self.ranking.move_to_end(next(iter(self.ranking)))
        kinds = (Share, Steps, Name, Members, Recent, Ranking)
        held = (self.share, self.steps, self.text, self.members, self.recent, self.ranking)
        assert tuple(map(type, held)) == kinds
        numbers = [self.share.value, self.steps, self.text.seen, len(self.members), self.recent.maxlen or 0]
        return sum(numbers) + sum(self.recent) + self.ranking[next(iter(self.ranking))] + self.random.draw()


class Leaf(Small):
    """A tensor that is no parameter, whose gradient adds up."""

    def build(self) -> None:
        self.leaf = torch.ones(2, requires_grad=True)

    def factor(self, batch: Tensor) -> Any:
        self.leaf.sum().backward()
        assert self.leaf.grad is not None
        return 1 + float(self.leaf.grad.sum())


class Plain(Small):
    """Values of the standard library, and bytes that two names share."""

    def build(self) -> None:
        self.pattern, self.when, self.path = re.compile("a", re.I), datetime(2020, 1, 1, tzinfo=UTC), PurePosixPath("a")
        self.rest, self.bytes = ..., bytearray(1)
        self.same = self.bytes

    def factor(self, batch: Tensor) -> Any:
        self.pattern = re.compile(self.pattern.pattern + "a", self.pattern.flags)
        self.when, self.path = self.when + timedelta(days=1), self.path / "b"
        self.same.append(self.bytes[-1] + 1)
        assert self.rest is ...
        assert self.pattern.fullmatch("A" * len(self.pattern.pattern))
        return len(self.pattern.pattern) + self.when.day + len(self.path.parts) + sum(self.bytes)


class Stop(Exception):
    """An error of the user's own."""


class Point(ctypes.Structure):
    """A structure of the user's own."""

    _fields_ = (("x", ctypes.c_double),)


class Day(date):
    """A day of the user's own."""


class Grid(np.ndarray[Any, Any]):
    """An array of the user's own."""


class Waiting(queue.SimpleQueue[float]):
    """A queue of the user's own."""


class DerivedInC(Small):
    """What objects hold that stands in no attribute."""

    def build(self) -> None:
        self.stop, self.point, self.day = Stop(1.0), Point(1.0), Day(2026, 1, 1)
        self.grid = np.zeros(2).view(Grid)

    def factor(self, batch: Tensor) -> Any:
        self.stop, self.day = Stop(self.stop.args[0] * 2), Day.fromordinal(self.day.toordinal() + 1)
        self.point.x *= 2
        self.grid += 1
        return self.stop.args[0] + self.point.x + self.day.day + float(self.grid.sum())


class WaitsInC(Small):
    """What pickle refuses, and what has no values."""

    warns = r"waiting, a Waiting, is(.|\n)*rows, a meta Tensor, is"

    def build(self) -> None:
        self.waiting, self.rows = Waiting(), torch.empty(1, device="meta")

    def factor(self, batch: Tensor) -> Any:
        self.rows = self.rows.repeat(2)
        self.waiting.put(1.0)
        return self.waiting.qsize()


class Made:
    """Made by its class alone."""

    def __new__(cls, value: float) -> "Made":
        made = object.__new__(cls)
        made.value = value
        return made

    value: float


class MakesLate(Small):
    """An object that only its class can make comes up in training."""

    warns = r"set in training to .* module\.made \(now \S+:Made\)"

    def build(self) -> None:
        self.made: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.made = self.made or Made(1.0)
        self.made.value += 1
        return self.made.value
