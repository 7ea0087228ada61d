"""State in tensors, arrays, containers and objects of many kinds."""

import collections
import enum
import os
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.utils.prune
from laws.objects.small import Small, held_lock
from torch import Tensor, nn


class Viewed(Small):
    """A view of a weight stays one."""

    def build(self) -> None:
        self.row = self.layer.weight.detach()[0]

    def factor(self, batch: Tensor) -> Any:
        self.row.mul_(0.9)
        return 1 + self.row.sum()


class ViewedLate(Small):
    """A view of a weight, made in training."""

    def build(self) -> None:
        self.row: Tensor | None = None

    def factor(self, batch: Tensor) -> Any:
        if self.row is None:
            self.row = self.layer.weight.detach()[0, 1:]
        self.row.mul_(0.9)
        return 1 + self.row.sum()


class Tensors(Small):
    """Tensors that share memory, one that is made in training, one that is a plain leaf."""

    def build(self) -> None:
        self.base = torch.zeros(4)
        self.half = self.base[:2]
        self.made: Tensor | None = None

    def factor(self, batch: Tensor) -> Any:
        self.base += 1
        self.half *= 2
        self.made = batch.mean(0) if self.made is None else self.made * 0.5 + batch.mean(0)
        return self.base.sum() + self.made.sum()


class Graphed(Small):
    """A loss that is kept with its graph."""

    def build(self) -> None:
        self.last: Any = None

    def factor(self, batch: Tensor) -> Any:
        factor = 1.0 if self.last is None else 1 + float(self.last.detach())
        self.last = self.layer(batch).mean()
        return factor


class Arrays(Small):
    def build(self) -> None:
        self.array = np.zeros(3)
        self.view = self.array
        self.number = np.float64(1)

    def factor(self, batch: Tensor) -> Any:
        self.array += 0.1
        self.number = self.number * 1.5
        return float(self.view.sum() + self.number)


class Schedule:
    """An object that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Callable_(Small):
    def build(self) -> None:
        self.schedule = Schedule()
        self.bound = self.schedule.__call__

    def factor(self, batch: Tensor) -> Any:
        return self.schedule() * 0.5 + self.bound()


@dataclass
class Stats:
    count: int = 0
    values: list[float] = field(default_factory=list)
    owner: Any = None


@dataclass(frozen=True)
class Fixed:
    level: int


class Slotted:
    __slots__ = ("__draws", "generator", "total")

    def __init__(self) -> None:
        self.total, self.generator, self.__draws = 0.0, random.Random(3), 0

    def draw(self) -> None:
        self.__draws += 1
        self.total += self.__draws * self.generator.random()


class Guarded:
    """Objects to being changed."""

    def __init__(self) -> None:
        object.__setattr__(self, "count", 0)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    @property
    def double(self) -> int:
        return 2 * self.count


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


Pair = collections.namedtuple("Pair", "left right")


class Own(dict[str, float]):
    """A dict of the user's own."""

    scale = 1.0


class Objects(Small):
    """Objects of the user's own classes, of many kinds."""

    def build(self) -> None:
        self.stats, self.fixed, self.slotted, self.guarded = Stats(), Fixed(1), Slotted(), Guarded()
        self.stats.owner = self.stats  # it contains itself
        self.level, self.pair, self.own = Level.LOW, Pair(1, [2]), Own(a=1.0)
        self.space = types.SimpleNamespace(depth=types.SimpleNamespace(n=1))
        self.money = Decimal("0.10")
        self.weak = weakref.ref(self.stats)
        self.log_path = Path("log")

    def factor(self, batch: Tensor) -> Any:
        self.stats.count += 1
        self.stats.values.append(float(batch.sum()))
        self.fixed = Fixed(self.fixed.level * 2)
        self.slotted.draw()
        object.__setattr__(self.guarded, "count", self.guarded.double // 2 + 1)
        self.level = Level.HIGH if self.stats.count > 1 else Level.LOW
        self.pair = self.pair._replace(left=self.pair.left + 1)
        self.pair.right[0] += 1
        self.own["a"] *= 1.5
        self.own.scale = self.own["a"]
        self.space.depth.n += 1
        self.money += Decimal("0.10")
        weak = self.weak()
        assert weak is self.stats
        assert self.stats.owner is self.stats
        numbers = [self.stats.count, sum(self.stats.values), self.fixed.level, self.slotted.total, self.guarded.count]
        numbers += [self.level.value, self.pair.left, self.pair.right[0], self.own.scale, self.space.depth.n]
        return sum(numbers) + float(self.money)


class Late(Small):
    """Objects that are there from the second step on."""

    def build(self) -> None:
        self.stats: Stats | None = None

    def factor(self, batch: Tensor) -> Any:
        self.stats = self.stats or Stats(3)
        self.stats.count += 1
        return self.stats.count


class Containers(Small):
    def build(self) -> None:
        self.counter: Counter[Any] = Counter()
        self.ordered: OrderedDict[Any, int] = OrderedDict(a=1, b=2)
        self.default: defaultdict[Any, Any] = defaultdict(lambda: 1)
        self.lists: defaultdict[int, list[float]] = defaultdict(list)
        self.numbers = {1, 33, 65}
        self.nested: dict[Any, Any] = {"modules": [self.layer], Level.LOW: 1, (1, "a"): deque([1, 2])}
        self.weights = {self.layer.weight: 1.0}
        self.gone: int | None = 3

    def factor(self, batch: Tensor) -> Any:
        length = len(self.lists)
        self.counter[length % 2] += 1
        self.ordered.move_to_end("a" if length % 2 else "b")
        self.default[length] *= 2
        self.lists[length].append(float(length))
        self.numbers.add(length * 8)
        self.numbers.discard(33)
        self.nested[Level.LOW] += 1
        self.nested[1, "a"].rotate(1)
        self.nested["modules"].append(self.nested["modules"][0])
        self.weights[self.layer.weight] *= 1.1
        if hasattr(self, "gone"):
            del self.gone
        values = [next(iter(self.ordered)) == "a", self.nested[1, "a"][0], self.weights[self.layer.weight]]
        order = sum(index * number for index, number in enumerate(self.numbers))
        assert all(module is self.layer for module in self.nested["modules"])
        return sum(values) + self.counter[0] + sum(self.default.values()) + self.nested[Level.LOW] + order


class Mode(str, enum.Enum):  # noqa: UP042 - as written before StrEnum
    WARM = "warm"
    LONG = "long"


class Phase(enum.IntEnum):
    FIRST = 1
    SECOND = 2


class Constants(Small):
    """Enumerations that are text and numbers, in attributes and hyperparameters."""

    def __init__(self, mode: Mode = Mode.WARM) -> None:
        super().__init__()
        self.save_hyperparameters()

    def build(self) -> None:
        self.phase, self.order = Phase.FIRST, {Mode.WARM: Phase.FIRST, Mode.LONG: Phase.SECOND}

    def factor(self, batch: Tensor) -> Any:
        mode = self.hparams["mode"]
        assert isinstance(mode, Mode)
        assert isinstance(self.phase, Phase)
        self.hparams["mode"] = Mode.LONG if self.phase is Phase.SECOND else Mode.WARM
        self.phase = Phase.SECOND
        return self.order[mode] + len(mode.value) + self.phase


class Locked(Small):
    """Many attributes of one kind that no file can hold."""

    warns = "not part of snapshots"

    def build(self) -> None:
        for number in range(20):
            setattr(self, f"lock_{number}", held_lock())


class Addresses(Small):
    """Numbers by which Python tells objects apart: others in each attempt."""

    def build(self) -> None:
        # Lives that are forked from one process would have the same addresses.
        before = [nn.Linear(2, 1, device="meta") for _ in range(os.getpid() % 97)]
        self.layer = nn.Linear(2, 1)
        del before
        weight, bias = self.layer.weight, self.layer.bias
        self.calls = {id(weight): 0, id(bias): 0}
        self.frozen, self.one = {id(bias)}, id(weight)
        self.order = [id(weight), id(bias)]

    def factor(self, batch: Tensor) -> Any:
        self.calls[id(self.layer.weight)] += 1
        self.frozen ^= {id(self.layer.weight)}
        self.order.reverse()
        numbers = [len(self.calls), self.one == id(self.layer.weight), self.order.index(id(self.layer.bias))]
        return 1 + sum(numbers) + self.calls[id(self.layer.weight)] + (id(self.layer.weight) in self.frozen)


class OnTensors(Small):
    """Attributes of a parameter and of a buffer."""

    def build(self) -> None:
        self.register_buffer("seen", torch.zeros(1))
        self.layer.weight.gain = 1.0

    def factor(self, batch: Tensor) -> Any:
        weight: Any = self.layer.weight
        weight.gain *= 1.2
        self.seen.calls = getattr(self.seen, "calls", 0) + 1
        return weight.gain + self.seen.calls


class ScaledByHand(Small):
    """An object of torch's that has a state_dict."""

    automatic_optimization = False

    def build(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.scaler.scale(self.layer(batch).square().mean()).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        with torch.no_grad():
            self.layer.bias.mul_(1 + self.scaler.get_scale() / 1000)


class OfTorch(Small):
    """Distributions that training fits, and torch's own constants."""

    def build(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(2), 1.0)
        self.arms = [torch.distributions.Beta(1.0, 1.0) for _ in range(2)]
        self.forms = {"memory": torch.contiguous_format, "layout": torch.strided, "scheme": torch.per_tensor_affine}

    def factor(self, batch: Tensor) -> Any:
        self.forms["memory"] = torch.channels_last
        self.prior.loc = self.prior.loc + batch.mean(0)
        self.arms[0] = torch.distributions.Beta(self.arms[0].mean + 1, 2.0)
        return 1 + self.prior.sample().sum() + self.arms[0].sample()


class OnTrainer(Small):
    """What a module keeps on its Trainer."""

    def factor(self, batch: Tensor) -> Any:
        trainer: Any = self.trainer
        trainer.seen = [*getattr(trainer, "seen", []), len(batch)]
        return 1 + sum(trainer.seen)


class Node:
    """A node of a tree."""

    def __init__(self, value: float) -> None:
        self.value, self.children = value, list[Node]()


class Identified(Small):
    """Objects by their ids, which differ between attempts."""

    def build(self) -> None:
        self.root = Node(1.0)
        self.nodes = {id(self.root): self.root}
        self.marked = {id(self.root)}

    def factor(self, batch: Tensor) -> Any:
        node = Node(float(batch.sum()))
        self.root.children.append(node)
        self.nodes[id(node)] = node
        if len(self.nodes) % 2:
            self.marked.add(id(node))
        return 1 + abs(sum(node.value for key, node in self.nodes.items() if key == id(node) and key in self.marked))


class SharesRecords(Small):
    """Rows of an array of records, and views of a complex tensor, share its memory."""

    def build(self) -> None:
        self.records = np.zeros(3, dtype=[("count", "i8"), ("total", "f8")])
        self.first, self.table = self.records[0], self.records.view(np.recarray)
        self.waves = torch.ones(2, dtype=torch.complex64)
        self.mirrored, self.slopes = self.waves.conj(), self.waves.conj().imag
        self.late: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.first["count"] += 1
        self.table.total[0] += float(batch.sum())
        self.late = self.waves[1:].conj() if self.late is None else self.late
        self.waves += 0.5j
        seen = self.mirrored.imag.sum() + 2 * self.slopes.sum() + 3 * self.late.imag.sum()
        return float(self.records["count"].sum()) + abs(float(self.records["total"].sum())) + seen.square()


class TogglesGrad(Small):
    """A tensor that is no weight collects gradients at times; operations of a class of numbers."""

    def build(self) -> None:
        self.probe = torch.ones(2)
        self.letters, self.back = iter("12345678"), reversed([*range(20)])
        self.kind: type = float

    def factor(self, batch: Tensor) -> Any:
        self.probe.requires_grad_(not self.probe.requires_grad)
        self.kind = int if self.global_step % 2 else float
        return 1 + self.probe.requires_grad + int(next(self.letters)) + next(self.back) + self.kind(1.5)


class RotatesViews(Small):
    """Views of one tensor change their places in a list; an array grows by itself."""

    def build(self) -> None:
        self.memory = torch.zeros(3)
        self.views = [self.memory[index] for index in range(3)]
        self.square = torch.zeros(2, 2)
        self.turned = self.square.t()
        self.seen = np.zeros(1)

    def factor(self, batch: Tensor) -> Any:
        self.views.append(self.views.pop(0))
        self.views[0] += 1
        self.square, self.turned = self.turned, self.square
        self.square[0] += 1
        self.seen.resize(self.seen.size + 1, refcheck=False)
        self.seen[-1] = float(batch.sum())
        return 1 + (self.memory * torch.arange(3)).sum() + self.turned[1].sum() + abs(self.seen.sum())


class TakesBack(Small):
    """An array is closed for writing, a tensor loses an attribute; an array shows other numbers of a weight."""

    def build(self) -> None:
        self.table, self.marked = np.zeros(2), torch.zeros(1)
        self.marked.tag = 1.0
        self.row = self.layer.weight.detach().numpy()[0, :1]

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            self.table.setflags(write=False)
            del self.marked.tag
        self.row = self.layer.weight.detach().numpy()[0, int(self.global_step) % 2 :]
        self.row *= 0.9
        return 1 + self.table.flags.writeable + hasattr(self.marked, "tag")
