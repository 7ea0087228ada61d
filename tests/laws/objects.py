"""What user code keeps beside weights, one row each: it decides the loss, so what is lost changes the bits."""

import collections
import copy
import enum
import functools
import itertools
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.utils.prune
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from midstride.engine import Callback, DataModule, TrainingModule

__all__ = ["KEPT", "NAMED", "Rows", "Small"]


class Rows(Dataset[Tensor]):
    """Samples scaled by what the data set was told."""

    def __init__(self) -> None:
        self.rows = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
        self.scale = 1.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] * self.scale


class Small(TrainingModule):
    """Trains a layer; each row adds to its loss what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.build()

    def build(self) -> None: ...

    def factor(self, batch: Tensor) -> Any:
        return 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean() * self.factor(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 4, shuffle=True)


class Dropping(Small):
    """An attribute of one of torch's modules."""

    def build(self) -> None:
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(2)

    def factor(self, batch: Tensor) -> Any:
        self.drop.p += 0.1
        self.norm.momentum = (self.norm.momentum or 0.0) * 0.5
        return self.drop(self.norm(batch)).mean() + 1


class Tagged(Small):
    """A plain attribute set on a container of torch's."""

    def build(self) -> None:
        self.body = nn.Sequential(nn.Linear(2, 1))

    def factor(self, batch: Tensor) -> Any:
        self.body.calls = getattr(self.body, "calls", 0) + 1  # type: ignore[assignment]
        return self.body.calls


class Private(Small):
    def build(self) -> None:
        self._count = 0

    def factor(self, batch: Tensor) -> Any:
        self._count += 1
        return self._count


class Tuned(Small):
    """Hyperparameters that training changes."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def factor(self, batch: Tensor) -> Any:
        self.hparams["gain"] *= 1.5
        return self.hparams["gain"]


class SharedDeque(Small):
    def build(self) -> None:
        self.recent: deque[float] = deque(maxlen=3)
        self.window = self.recent

    def factor(self, batch: Tensor) -> Any:
        self.recent.append(float(batch.sum()))
        return 1 + sum(self.window)


class Part(nn.Module):
    def __init__(self, shared: dict[str, float]) -> None:
        super().__init__()
        self.shared = shared


class SharedDict(Small):
    """A dict that submodules share."""

    def build(self) -> None:
        shared = {"calls": 1.0}
        self.parts = nn.ModuleList(Part(shared) for _ in range(2))

    def factor(self, batch: Tensor) -> Any:
        self.parts[0].shared["calls"] *= 1.5  # type: ignore[union-attr, operator, index]
        return self.parts[1].shared["calls"]  # type: ignore[union-attr, index]


class Hooked(Small):
    """A list that only a hook closes over."""

    def build(self) -> None:
        seen: list[float] = []
        self.layer.register_forward_hook(lambda module, args, output: seen.append(float(output.detach().mean())))
        self.total = lambda: sum(seen)

    def factor(self, batch: Tensor) -> Any:
        return 1 + self.total()


class Scaler:
    """A hook that is an object, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.calls


class HookedByObject(Small):
    """An object that only the hooks of a layer hold, beside a method of the module."""

    def build(self) -> None:
        self.calls = 0
        self.layer.register_forward_hook(Scaler())
        self.layer.register_forward_pre_hook(self.called)

    def called(self, module: nn.Module, args: Any) -> None:
        self.calls += 1

    def factor(self, batch: Tensor) -> Any:
        return self.calls


class Counted(Small):
    """A number that a closure counts."""

    def build(self) -> None:
        count = 0

        def advance() -> int:
            nonlocal count
            count += 1
            return count

        self.advance = advance

    def factor(self, batch: Tensor) -> Any:
        return self.advance()


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
    __slots__ = ("generator", "total")

    def __init__(self) -> None:
        self.total, self.generator = 0.0, random.Random(3)


class Guarded:
    """Objects to being changed."""

    def __init__(self) -> None:
        object.__setattr__(self, "count", 0)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    @property
    def double(self) -> int:
        return 2 * self.count  # type: ignore[attr-defined, no-any-return]


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
        self.slotted.total += self.slotted.generator.random()
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
        numbers = [self.stats.count, sum(self.stats.values), self.fixed.level, self.slotted.total, self.guarded.count]  # type: ignore[attr-defined]
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
        place = len(self.lists)
        self.counter[place % 2] += 1
        self.ordered.move_to_end("a" if place % 2 else "b")
        self.default[place] *= 2
        self.lists[place].append(float(place))
        self.numbers.add(place * 8)
        self.numbers.discard(33)
        self.nested[Level.LOW] += 1
        self.nested[1, "a"].rotate(1)
        self.nested["modules"].append(self.nested["modules"][0])
        self.weights[self.layer.weight] *= 1.1
        if hasattr(self, "gone"):
            del self.gone
        values = [next(iter(self.ordered)) == "a", self.nested[1, "a"][0], self.weights[self.layer.weight]]
        order = sum(place * number for place, number in enumerate(self.numbers))
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

    def build(self) -> None:
        for number in range(20):
            setattr(self, f"lock_{number}", threading.Lock())


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


class Replaced(Small):
    """A container that is replaced while another name keeps the old one."""

    def build(self) -> None:
        self.now: list[float] = [1.0]
        self.old = self.now

    def factor(self, batch: Tensor) -> Any:
        if len(self.now) > 2:
            self.now = [0.5]
        self.now.append(float(batch.sum()))
        return 1 + sum(self.now) + 10 * sum(self.old)


class Numbered(torch.optim.SGD):
    """Counts beside its `state`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.calls
            group["note"] = self.calls
        return super().step(closure)


class Optimized(Small):
    def configure_optimizers(self) -> Any:
        return Numbered(self.parameters())


def _each_step(optimizer: Any, scheduler: Any) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Lambda(Small):
    """A schedule that closes over what training changes."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        bad = [0]

        def rate(step: int) -> float:
            bad[0] += step
            return 1 / (1 + bad[0])

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return _each_step(optimizer, scheduler)


class Cyclic(Small):
    mode = "triangular"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, mode=self.mode)  # type: ignore[arg-type]
        return _each_step(optimizer, scheduler)


class Cyclic2(Cyclic):
    mode = "triangular2"


class CyclicRange(Cyclic):
    mode = "exp_range"


class Wide(torch.optim.Optimizer):
    """Keeps float32 and integers for weights of bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                master = state.setdefault("master", parameter.detach().float())
                state.setdefault("calls", torch.zeros((), dtype=torch.int64)).add_(1)
                state.setdefault("nested", {"list": [torch.ones(2)]})["list"][0].mul_(1.01)
                master.sub_(parameter.grad.float(), alpha=group["lr"] / int(state["calls"]))
                parameter.copy_(master)


class Narrow(Small):
    def build(self) -> None:
        self.layer.bfloat16()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch.bfloat16()).square().mean().float()

    def configure_optimizers(self) -> Any:
        return Wide(self.parameters())


class Growing(Small):
    """A buffer that grows, and one that is registered in training."""

    def build(self) -> None:
        self.register_buffer("memory", torch.zeros(0))

    def factor(self, batch: Tensor) -> Any:
        self.memory = torch.cat([self.memory, batch.sum().detach().view(1)])
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(1))
        self.late += 1  # type: ignore[has-type]
        return 1 + self.memory.sum() + self.late


class Listed(Small):
    """A parameter and a layer that come up in training, with their groups."""

    def build(self) -> None:
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.head: nn.Module | None = None

    def factor(self, batch: Tensor) -> Any:
        if len(self.extra) == 1:
            self.extra.append(nn.Parameter(torch.full((2,), 2.0)))
            self.optimizers().add_param_group({"params": [self.extra[1]], "lr": 0.02})
        if self.head is None:
            self.head = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2), Part({"calls": 1.0}))
            self.optimizers().add_param_group({"params": self.head.parameters(), "lr": 0.005})
        self.head[2].shared["calls"] += 1  # type: ignore[index, union-attr, operator]
        return sum(parameter.sum() for parameter in self.extra) + self.head[:2](batch).sum()  # type: ignore[index]


class Averaged(Small):
    """An average of the weights that is made later."""

    def build(self) -> None:
        self.average: Any = None

    def factor(self, batch: Tensor) -> Any:
        if self.average is None:
            self.average = torch.optim.swa_utils.AveragedModel(self.layer)
        self.average.update_parameters(self.layer)
        return 1 + self.average(batch).mean().detach()


class Forgetful(Callback):
    """Acts on what it counts, and has no state_dict."""

    def __init__(self, module_tensor: bool = False) -> None:
        self.batches = 0
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.seen.append(batch_idx)
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (self.batches + sum(self.seen))


class Curriculum(Callback):
    """Tells the data set what to give."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.dataset.scale *= 1.5


class Watching(Small):
    """The data set reads what the module counts, in a deque that both have; a callback tells the data set."""

    def build(self) -> None:
        self.recent: deque[float] = deque([1.0], maxlen=3)
        self.dataset = Reading(self.recent)

    def factor(self, batch: Tensor) -> Any:
        self.recent.append(float(len(self.recent)))
        return 1 + sum(self.recent)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, shuffle=True)


class Reading(Rows):
    def __init__(self, recent: deque[float]) -> None:
        super().__init__()
        self.recent = recent

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + sum(self.recent)


class Counting(DataModule):
    """Its own counter, moved by the module."""

    def __init__(self) -> None:
        self.told = 0
        self.dataset = Rows()

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, shuffle=True)


class Wrapped(DataModule):
    """Torch's own data sets, of which none is an attribute, around one of the user's."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(ConcatDataset([Rows(), Rows()]), range(30)), 4, shuffle=True)


class TellingWrapped(Small):
    def factor(self, batch: Tensor) -> Any:
        data = self.trainer.last_fit.context.feeds.training.source.dataset.dataset.datasets[1]  # type: ignore[union-attr, attr-defined]
        data.scale *= 1.5
        return data.scale


class Opened(DataModule):
    """Data, their module and a sampler hold what no file can."""

    def __init__(self) -> None:
        self.locks = [threading.Lock(), threading.Lock()]

    def train_dataloader(self) -> Any:
        rows: Any = Rows()
        rows.file = Path(__file__).open()  # noqa: SIM115
        weakref.finalize(rows, rows.file.close)
        return DataLoader(rows, 4, sampler=LockedSampler(range(24)))


class LockedSampler(SequentialSampler):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> Any:
        return LockedSampler(self.data_source)


class LockedCallback(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class OfTensors(DataModule):
    def __init__(self) -> None:
        self.dataset = TensorDataset(torch.ones(24, 2))

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, collate_fn=lambda rows: torch.stack([row for (row,) in rows]))


class WritesTensors(Small):
    def factor(self, batch: Tensor) -> Any:
        self.trainer.last_fit.context.feeds.training.source.dataset.tensors[0].mul_(1.1)  # type: ignore[union-attr, attr-defined]
        return 1.0


class Telling(Small):
    def train_dataloader(self) -> Any:
        return None

    def factor(self, batch: Tensor) -> Any:
        data = self.trainer.last_fit.context.feeds.training.source.dataset  # type: ignore[union-attr, attr-defined]
        data.told = getattr(data, "told", 0) + 1
        data.scale = 1 + data.told / 10
        return data.told


class Pruned(Small):
    def factor(self, batch: Tensor) -> Any:
        if not hasattr(self.layer, "weight_mask"):
            nn.utils.prune.l1_unstructured(self.layer, "weight", 1)  # type: ignore[no-untyped-call]
        return 1.0


class Opening(Small):
    """None first, and what no file can hold later."""

    def build(self) -> None:
        self.numbers: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.numbers = self.numbers or (number for number in range(1, 100))
        return next(self.numbers)


class ActsOtherwise(Small):
    def build(self) -> None:
        self.act: Any = torch.relu

    def factor(self, batch: Tensor) -> Any:
        self.act = torch.tanh
        return 1 + self.act(batch).mean()


class CountsOnClass(Small):
    calls = 0

    def factor(self, batch: Tensor) -> Any:
        CountsOnClass.calls += 1
        return self.calls


CALLS = {"factor": 0}


class CountsInGlobal(Small):
    def factor(self, batch: Tensor) -> Any:
        CALLS["factor"] += 1
        return CALLS["factor"]


class LargeRows(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(1_000_000)


class Weighs(Small):
    def build(self) -> None:
        self.dataset = LargeRows()

    def factor(self, batch: Tensor) -> Any:
        self.dataset.weights *= 2
        return self.dataset.weights[0]

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, shuffle=True)


class Losing(Numbered):
    """Forgets the momentum it is given."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["momentum"] = 0.9
        return super().step(closure)


class Loses(Small):
    def configure_optimizers(self) -> Any:
        return Losing(self.parameters())


class Swaps(Small):
    def factor(self, batch: Tensor) -> Any:
        self.trainer.optimizers = [torch.optim.Adam(self.parameters())]
        return 1.0


class Deaf(Callback):
    """Is another one whenever it is given its state."""

    def __init__(self) -> None:
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"loads": self.loads}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.loads += 1


class Tally:
    """Counts, and is no value of its own."""

    def __init__(self) -> None:
        self.batches = 0


class Tallied(torchmetrics.SumMetric):
    """A metric that keeps an object beside its states."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def update(self, value: Any) -> None:
        self.tally.batches += 1
        super().update(value * self.tally.batches)


class Metered(Small):
    """What an object in a metric counts weighs what the metric sees, and so the loss."""

    def build(self) -> None:
        self.meter = Tallied()

    def factor(self, batch: Tensor) -> Any:
        self.meter.update(batch.detach().mean())
        self.log("seen", self.meter, on_step=False, on_epoch=True)
        return 1.0 + self.meter.tally.batches


class Clipped(torchmetrics.SumMetric):
    """Takes values in, and gives others out."""

    @property
    def seen(self) -> float:
        return self.__dict__.get("seen", 0.0)  # type: ignore[no-any-return]

    @seen.setter
    def seen(self, value: float) -> None:
        self.__dict__["seen"] = value + 1.0

    def update(self, value: Any) -> None:
        super().update(value)
        self.seen = 1.0


class Clips(Small):
    def build(self) -> None:
        self.meter = Clipped()

    def factor(self, batch: Tensor) -> Any:
        self.meter.update(batch.detach().mean())
        return 1.0


class Drawing(Sampler[int]):
    """Draws anew whenever its epoch begins, from a generator of its own; rows differ in what their state lacks."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 24

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Forgetting(Drawing):
    """Its state lacks the epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Asked(Drawing):
    """Its state counts how often it was given one."""

    loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loads": self.loads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loads += 1


class Expecting(Drawing):
    """Takes back less than training gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "losses": self.losses.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.losses = torch.zeros(2).copy_(state["losses"])


class Samples(Small):
    """Reads by a sampler of its own, and tells it what it lost."""

    sampler: type[Drawing] = Drawing

    def build(self) -> None:
        self.drawing = self.sampler()

    def factor(self, batch: Tensor) -> Any:
        if isinstance(self.drawing, Expecting):
            self.drawing.losses = torch.cat([self.drawing.losses, batch.detach().sum(1)])
        return 1.0

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 4, sampler=self.drawing)


class SamplesForgetting(Samples):
    sampler = Forgetting


class SamplesAsked(Samples):
    sampler = Asked


class SamplesExpecting(Samples):
    sampler = Expecting


class Stream(IterableDataset[Tensor]):
    """Its state is none that can be written."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        self.place = 0
        for row in Rows().rows:
            self.place += 1
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Streams(Small):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 4)


class Looping(DataLoader[Tensor]):
    """A loader with a way of its own to iterate."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Loops(Small):
    def train_dataloader(self) -> Any:
        return Looping(Rows(), 4)


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class HookedLate(Small):
    """A hook that training adds."""

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1 and not self.layer._forward_hooks:
            self.layer.register_forward_hook(doubled)
        return 1.0


class Unhooked(Small):
    """A hook that training removes, before another that stays."""

    def build(self) -> None:
        self.act = nn.ReLU()
        self.handle = self.act.register_full_backward_hook(lambda module, *gradients: None)
        self.act.register_full_backward_hook(self.seen)

    def seen(self, module: nn.Module, *gradients: Any) -> None: ...

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            self.handle.remove()
        return 1 + self.act(self.layer(batch)).mean()


class HookedForAStep(Small):
    """A hook that each step adds and removes, of which nothing is to be said."""

    def factor(self, batch: Tensor) -> Any:
        handle = self.layer.register_forward_hook(doubled)
        self.layer(batch)
        handle.remove()
        return 1.0


#: name -> what makes it, whether it is refused, and the words
NAMED: dict[str, tuple[Any, bool, str]] = {
    "a parameter that goes": ((Pruned, None, list), True, "the parameter layer.weight was there when training began"),
    "an optimizer that loses": ((Loses, None, list), True, "the optimizers, after the first step, did not take back"),
    "other optimizers": ((Swaps, None, list), True, "replaced in training: SGD became Adam"),
    "a callback": ((Small, None, lambda: [Deaf()]), True, "the callbacks, before the first step, did not take back"),
    "a metric": ((Clips, None, list), True, "the metrics, after the first step, did not take back the state given"),
    "a sampler that forgets": ((SamplesForgetting, None, list), True, "Forgetting gives another order when it is run"),
    "a sampler that changes": (
        (SamplesAsked, None, list),
        True,
        "the loaders, before the first step, .*sampler.*loads",
    ),
    "a sampler that fills up": (
        (SamplesExpecting, None, list),
        True,
        r"copy_\(state(.|\n)*the loaders, after the first step",
    ),
    "a stream": ((Streams, None, list), True, "lock"),
    "a loader": ((Loops, None, list), True, "the train loader is a Looping with an __iter__ of its own"),
    "a hook that comes": ((HookedLate, None, list), False, r"objects:doubled in layer\.forward_hooks is new\. A res"),
    "a hook that goes": (
        (Unhooked, None, list),
        False,
        r"<lambda> in act\.backward_hooks is gone\. A",
    ),
    "None first": ((Opening, None, list), False, "attribute numbers, a generator, is not part of snapshots"),
    "beside the module": (
        (Small, Opened, lambda: [LockedCallback()]),
        False,
        r"not part of snapshots: callbacks\.LockedCallback\.lock, a lock, data\.module\.locks\.0, a lock, "
        r"data\.module\.locks\.1, a lock, data\.training\.file, a TextIOWrapper\. ",
    ),
    "of a sampler": (
        (Small, Opened, list),
        False,
        r"not part of snapshots: samplers\.sampler of training\.lock, a lock",
    ),
    "data of a library": (
        (WritesTensors, OfTensors, list),
        False,
        r"part of no snapshot: data\.module\.dataset\.tensors\[0\]",
    ),
    "many of a kind": ((Locked, None, list), False, r"not part of snapshots"),
    "a function": ((ActsOtherwise, None, list), False, r"what no snapshot can hold: module\.act \(now .*tanh"),
    "on the class": ((CountsOnClass, None, list), False, r"part of no snapshot: class CountsOnClass: calls \(0, now 1"),
    "in a global": ((CountsInGlobal, None, list), False, r"part of no snapshot: global .*CALLS\['factor'\] \(0, now 1"),
    "large data": ((Weighs, None, list), False, r"part of no snapshot: data\.training\.weights"),
}

#: name -> what makes the module, the data or None, and the callbacks
Made = tuple[Callable[[], Small], Callable[[], Any] | None, Callable[[], list[Callback]]]
_MODULES: list[type[Small]] = [
    *(Dropping, Tagged, Private, Tuned, SharedDeque, SharedDict, Hooked, Counted, Viewed, ViewedLate, Tensors),
    *(
        Graphed,
        Arrays,
        Callable_,
        Objects,
        Late,
        Containers,
        Constants,
        Iterators,
        Generators,
        OfClass,
        Teacher,
        Replaced,
    ),
    *(
        Constants,
        Optimized,
        Lambda,
        Cyclic,
        Cyclic2,
        CyclicRange,
        Narrow,
        Growing,
        Listed,
        Averaged,
        Metered,
        Samples,
        HookedByObject,
        HookedForAStep,
    ),
]
KEPT: dict[str, Made] = {kind.__name__: (kind, None, list) for kind in _MODULES}
KEPT |= {
    "callback": (Small, None, lambda: [Forgetful()]),
    "data of the module": (Watching, None, lambda: [Curriculum()]),
    "data": (Telling, Counting, list),
    "data that torch wraps": (TellingWrapped, Wrapped, list),
}
