"""Dicts whose keys are objects, sets of objects, and sets whose order depends on what was taken out of them."""

import dataclasses
import enum
import os
from typing import Any

from laws.objects.small import Small
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Key:
    number: int
    parts: tuple[int, ...] = ()


class Sample:
    def __init__(self, number: int) -> None:
        self.number = number


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


class Keyed(Small):
    """Keys that are equal by value, by identity and by address, more of them each step; values that lists share."""

    def build(self) -> None:
        before = [nn.Linear(2, 1, device="meta") for _ in range(os.getpid() % 97)]  # lives have other addresses
        self.other = nn.Linear(2, 1)
        del before
        self.samples = [Sample(number) for number in range(3)]
        self.by_sample = {sample: 0 for sample in self.samples}
        self.by_key: dict[Any, int] = {}
        self.by_tensor: dict[Any, list[int]] = {}
        self.a_few: dict[Any, list[int]] = {}
        self.values: list[list[int]] = []

    def factor(self, batch: Tensor) -> Any:
        step = int(self.global_step)
        self.samples.append(Sample(step))
        self.by_sample |= {self.samples[-1]: step, self.samples[1]: self.by_sample[self.samples[1]] + 1}
        for key in (Key(step % 3), Key(0, (step,)), frozenset({step % 2, 7}), (Side.LEFT, step), (Key(1), None)):
            self.by_key[key] = self.by_key.get(key, 0) + step + 1
        for parameter in self.parameters():
            self.by_tensor.setdefault(parameter, []).append(step)
            self.a_few.setdefault(id(parameter), []).append(1)
        self.values = [*self.by_tensor.values(), *self.a_few.values()]
        self.values[0].append(step)
        self.values[-1].append(step)
        shared = len(self.by_tensor[self.layer.weight]) + len(self.a_few[id(self.other.bias)])
        by_key = sum(index * value for index, value in enumerate(self.by_key.values()))
        return 1 + shared + by_key + sum(sample.number * self.by_sample[sample] for sample in self.samples)


class Gathering(Small):
    """Sets that training fills with objects."""

    def build(self) -> None:
        self.samples, self.sides = [Sample(0)], {Side.LEFT}
        self.seen: set[Any] = set()
        self.keys: set[Key] = set()
        self.done: frozenset[Any] = frozenset()

    def factor(self, batch: Tensor) -> Any:
        self.samples.append(Sample(len(self.samples)))
        self.seen ^= {self.samples[-1], self.layer.weight}
        self.sides ^= {Side.LEFT}
        self.keys.add(Key(int(self.global_step)))
        self.done |= {self.samples[0], Key(1)}
        numbers = sum(sample.number for sample in self.samples if sample in self.seen)
        kept = [self.layer.weight in self.seen, self.samples[0] in self.done, Key(0) in self.keys, len(self.sides)]
        return 1 + numbers + sum(kept) + len(self.keys)


class Pools(Small):
    """Sets out of which training takes items as they come, and to which it adds some."""

    def build(self) -> None:
        self.numbers = {number * 8191 % (1 << 30) for number in range(300)}
        self.pairs: set[tuple[int, float]] = set()
        self.refilled: set[int] = set()

    def factor(self, batch: Tensor) -> Any:
        step = int(self.global_step)
        taken = [self.numbers.pop() for _ in range(20)]
        self.numbers.difference_update(list(self.numbers)[::9])
        self.numbers.update(number * 64 for number in taken[::3])
        self.pairs.update((number % 512 * 64, number / 3) for number in taken)
        self.pairs.difference_update([pair for pair in self.pairs if pair[0] % 3 == step % 3])
        for number in taken[:4]:
            self.refilled.add(number % 97 * 128)
        self.refilled.discard(next(iter(self.refilled)))
        orders = [*self.numbers, *(pair[0] for pair in self.pairs), *self.refilled]
        return 1 + sum((index % 7) * number for index, number in enumerate(orders)) % 1013 / 1013
