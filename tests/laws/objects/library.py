"""Iterators, queues, arrays and shared values of Python's own."""

import array
import ctypes
import itertools
import multiprocessing
import queue
import textwrap
import threading
import types
import weakref
from collections import UserDict, defaultdict
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import networkx
import numpy as np
import pandas as pd
import torch
from laws.objects.small import Rows, Small
from torch import Tensor, ones
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Sampler


class Iterated(Small):
    """Iterators over others; two share a list, and one has come round."""

    def build(self) -> None:
        self.steps = [0.1, 0.2, 0.3]
        self.phases = itertools.cycle(self.steps)
        self.pairs = zip(itertools.count(), itertools.repeat(2), strict=False)
        self.chained = itertools.chain(self.steps, [7.0] * 99)
        self.numbered: Any = None
        self.mapped = map(self.scaled, range(99))

    def scaled(self, number: int) -> float:
        return number * len(self.steps)

    def factor(self, batch: Tensor) -> Any:
        self.numbered = self.numbered or enumerate(range(99), start=1)
        number, two = next(self.pairs)
        return next(self.phases) + number * two + next(self.chained) + next(self.numbered)[0] + next(self.mapped)


class Queued(Small):
    def build(self) -> None:
        self.first: queue.Queue[float] = queue.Queue(maxsize=2)
        self.least: queue.PriorityQueue[float] = queue.PriorityQueue()
        self.warm = threading.Event()

    def factor(self, batch: Tensor) -> Any:
        value = float(batch.sum())
        taken = self.first.get() if self.first.full() else 0.0
        self.first.put(value)
        self.least.put(value)
        if self.least.qsize() == 2:
            self.warm.set()
        return taken + (self.least.get() if self.least.qsize() > 2 else 0.0) + self.warm.is_set()


class Packs(Small):
    """Named tuples of a library, one of which training makes."""

    def build(self) -> None:
        self.packed: Any = pack_sequence([ones(2)])
        self.newest: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.newest = pack_sequence([self.packed.data + batch.mean().detach()])
        self.packed = self.newest
        return self.newest.data.sum()


class Wraps(Small):
    """An object of a library whose attributes are all that it holds, which does not change."""

    def build(self) -> None:
        self.wrapper = textwrap.TextWrapper()
        self.fast = torch.compile(self.layer, backend="eager")

    def factor(self, batch: Tensor) -> Any:
        return self.fast(batch).mean().detach() + self.wrapper.width


class Narrows(Wraps):
    """An object of a library that training changes."""

    def factor(self, batch: Tensor) -> Any:
        self.wrapper.width += 1
        return self.wrapper.width


class CartPole:
    """As an environment of gymnasium, which can be closed."""

    __module__ = "gymnasium.envs.classic_control.cartpole"

    def __init__(self) -> None:
        self.angle = 0.0

    def step(self) -> float:
        self.angle += 0.1
        return self.angle

    def close(self) -> None:
        """Nothing is open."""


class Plays(Small):
    """An environment that training steps."""

    warns = "attribute env, a CartPole, is not part of snapshots; .*shows how, under An environment of gymnasium"

    def build(self) -> None:
        self.env = CartPole()

    def factor(self, batch: Tensor) -> Any:
        return self.env.step()


class Env:
    """As the base class of gymnasium's environments."""

    __module__ = "gymnasium.core"

    def close(self) -> None:
        """Nothing is open."""


class Pendulum(Env):
    """As an environment of gymnasium, which is written in Python."""

    __module__ = "gymnasium.envs.classic_control.pendulum"

    def __init__(self) -> None:
        self.angle, self.numbers = 0.0, np.random.default_rng(3)

    def step(self) -> float:
        self.angle += self.numbers.random()
        return self.angle


class Swings(Small):
    """An environment whose attributes show all that it holds."""

    def build(self) -> None:
        self.env = Pendulum()

    def factor(self, batch: Tensor) -> Any:
        return self.env.step()


class Numbers(Small):
    """In memory that others may look at, too."""

    def build(self) -> None:
        self.seen = array.array("d", [0.0])
        self.step = ctypes.c_int64(0)
        self.objects = np.array([None, {"count": 0}, [1.0]], dtype=object)
        self.view = self.objects[1:]

    def factor(self, batch: Tensor) -> Any:
        self.seen.append(float(batch.sum()))
        self.step.value += 1
        self.view[0]["count"] += 1
        self.objects[0] = (self.step.value, self.objects[2])
        self.objects[2].append(self.seen[-1])
        return sum(self.seen) + self.step.value + self.objects[1]["count"] + sum(self.objects[0][1])


class Tabulates(Small):
    """Tables, masked arrays and times, which training grows, replaces and makes; two objects share a table."""

    def build(self) -> None:
        self.table, self.prior = pd.DataFrame({"loss": [0.0], "phase": ["warm"]}), pd.Series([1.0, 2.0])
        self.shown = [self.table]
        self.valid = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])
        self.until = datetime(2026, 3, 29, tzinfo=ZoneInfo("Europe/Berlin"))
        self.groups: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.table.loc[len(self.table)] = [float(batch.sum()), "high" if batch.sum() > 0 else "low"]
        self.prior.iloc[len(self.table) % 2] += 1
        self.groups = self.table.groupby("phase").loss.mean()
        self.valid[len(self.table) % 3] = np.ma.masked if batch.sum() > 0 else 5.0
        self.until += timedelta(days=1)
        hours = self.until.utcoffset().total_seconds() / 3600  # type: ignore[union-attr]
        return self.groups.sum() + len(self.shown[0]) + self.prior.sum() + float(self.valid.sum()) + hours


class Held:
    def __init__(self, number: int) -> None:
        self.n = number


class Refers(Small):
    """Weak containers and proxies of objects that others hold."""

    def build(self) -> None:
        self.parts = [Held(number) for number in range(3)]
        self.active: weakref.WeakSet[Any] = weakref.WeakSet()
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.newest = weakref.proxy(self.parts[0])

    def factor(self, batch: Tensor) -> Any:
        part = self.parts[int(self.global_step) % 2]
        self.active.add(part)
        self.counts[part] = self.counts.get(part, 0) + 1
        self.named[f"{self.global_step}"] = part
        self.newest.n += 1
        self.newest = weakref.proxy(part)
        part.n += len(self.named) + sum(part.n for part in self.active)
        return sum(part.n for part in self.parts) + sum(self.counts.values())


class Links(Small):
    """A graph, whose class caches views of it."""

    def build(self) -> None:
        self.graph = networkx.Graph()

    def factor(self, batch: Tensor) -> Any:
        self.graph.add_edge(len(self.graph), 0, weight=float(batch.sum()))
        return sum(weight for _, _, weight in self.graph.edges.data("weight"))


class Told(Rows):
    """Processes that read it share what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.step = multiprocessing.Value("q", 0)
        self.weights = multiprocessing.Array("d", 24)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] * (1 + self.step.value + self.weights[index])


class Balanced(Sampler[int]):
    """Goes round and round."""

    def __init__(self) -> None:
        self.rounds = [itertools.cycle(range(start, 24, 3)) for start in range(3)]

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        yield from (next(self.rounds[number % 3]) for number in range(20))


class TellsWorkers(Small):
    def build(self) -> None:
        self.rows = Told()

    def factor(self, batch: Tensor) -> Any:
        with self.rows.step.get_lock():
            self.rows.step.value += 1
        self.rows.weights[self.rows.step.value] = float(batch.sum())
        return 1.0

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, sampler=Balanced())


class Steps(ctypes.c_int64):
    """A number of the user's own, with an attribute."""

    bonus = 0.0


class Measures(array.array):
    """An array of the user's own, with an attribute."""

    scale = 1.0


class Taking(queue.Queue[float]):
    """A queue of the user's own, which counts."""

    taken = 0

    def _get(self) -> float:
        self.taken += 1
        return super()._get()


class Grouped(defaultdict[int, Any]):
    """A dict of the user's own, which makes its values."""


class OfPython(Small):
    """Objects of Python's own that training makes, of classes derived from them, and iterators read to their ends."""

    def build(self) -> None:
        self.both = itertools.zip_longest(iter([1.0]), iter([2.0] * 9), fillvalue=7.0)
        self.thirds = itertools.count(Fraction(1, 3), Fraction(1, 7))
        self.step, self.seen, self.groups = Steps(1), Measures("d"), Grouped(float)
        self.late: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.late = self.late or [types.SimpleNamespace(n=0), UserDict(n=0), Taking(), Measures("d"), Grouped(list)]
        space, named, taking, seen, grouped = self.late
        space.n += 1
        named["n"] += 2
        taking.put(float(batch.sum()))
        taking.put(taking.get())
        self.step.value += 1
        self.step.bonus += 0.5
        grouped[space.n % 2].append(space.n)
        if space.n == 2:
            self.groups.default_factory = int
        self.groups[space.n] += self.groups[space.n % 2 + 7] + len(grouped[1])
        for measures in (self.seen, seen):
            measures.append(float(batch.mean()))
            measures.scale += 0.1
        kept = [
            *next(self.both),
            next(self.thirds),
            space.n,
            named["n"],
            taking.taken,
            self.step.value,
            self.step.bonus,
        ]
        kept += [len(grouped[1]), *self.groups.values(), isinstance(self.groups[9], float)]
        return sum(map(float, kept)) + sum(self.seen) * self.seen.scale + sum(seen) * seen.scale
