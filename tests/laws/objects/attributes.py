"""State in attributes of modules, and objects that two of them share."""

import itertools
import random
from array import array
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from laws.objects.python_values import Schedule
from laws.objects.small import Small
from torch import Tensor, nn


class Dropping(Small):
    """An attribute of one of torch's modules."""

    def build(self) -> None:
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(2)

    def factor(self, batch: Tensor) -> Any:
        self.drop.p += 0.1
        self.norm.momentum = (self.norm.momentum or 0.0) * 0.5
        return self.drop(self.norm(batch)).mean() + 1


#: a list that an attribute also holds, and the module
SHARED: dict[str, Any] = {"losses": [1.0]}


class SharesWithGlobal(Small):
    """A list and a module that a global container also holds."""

    def build(self) -> None:
        self.losses, self.calls = SHARED["losses"], 0
        SHARED["module"] = self

    def factor(self, batch: Tensor) -> Any:
        self.calls += 1
        SHARED["losses"].append(float(batch.mean()))
        return self.calls + sum(SHARED["losses"])


class LeavesToGlobal(Small):
    """A list that a global holds leaves the module, which gets another one."""

    warns = r"part of no snapshot: global \S+\.SHARED\['left'\]"

    def build(self) -> None:
        self.left: list[int] = []
        SHARED["left"] = self.left

    def factor(self, batch: Tensor) -> Any:
        self.left = []
        SHARED["left"].append(1)
        return len(SHARED["left"])


class Tagged(Small):
    """A plain attribute set on a container of torch's."""

    def build(self) -> None:
        self.body = nn.Sequential(nn.Linear(2, 1))

    def factor(self, batch: Tensor) -> Any:
        self.body.calls = getattr(self.body, "calls", 0) + 1
        return self.body.calls


class Rearranged(Small):
    """Attributes of objects and of the module, in the order in which training sets them."""

    def build(self) -> None:
        self.totals, self.new = SimpleNamespace(c=1.0, a=2.0, b=3.0), SimpleNamespace()

    def factor(self, batch: Tensor) -> Any:
        step = self.global_step
        name = ("b", "a", "c")[step % 3]
        value = vars(self.totals).pop(name)
        vars(self.totals)[name] = value + 1
        setattr(self.new, f"n{9 - step}", step + 1.0)
        setattr(self, f"total_{9 - step}", step + 1.0)
        late = [value for name, value in vars(self).items() if name.startswith("total_")]
        parts = (*vars(self.totals).values(), *vars(self.new).values(), *late)
        return 1 + sum(part / (place + 1) for place, part in enumerate(parts))


class Meter:
    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def update(self, value: float) -> float:
        self.count, self.total = self.count + 1, self.total + value
        return self.total / self.count


class Gauge(Meter):
    __slots__ = ("unit",)


class Metering(Small):
    """Meters that a class makes, also in a dict that training makes, and by keys that are objects."""

    def build(self) -> None:
        self.meters: defaultdict[str, Meter] = defaultdict(Meter)
        self.gauges: defaultdict[Any, Gauge] = defaultdict(Gauge)
        self.late: dict[str, defaultdict[str, Meter]] = {}

    def factor(self, batch: Tensor) -> Any:
        of_phase = self.late.setdefault("train", defaultdict(Gauge))
        several = (
            self.meters[str(self.global_step % 3)],
            of_phase["loss"],
            self.gauges[self.layer],
            self.gauges["all"],
        )
        return 1 + sum(meter.update(float(batch.sum())) for meter in several)


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


class ComesToShare(Small):
    """Containers of every kind that training makes, each under two names, and then changes under one of them."""

    def build(self) -> None:
        self.one: list[Any] = []
        self.two: list[Any] = []

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:  # the first step ends with a trial, which would part what is not told
            self.one = [[1.0], {"a": 1.0}, deque([1.0]), {1.0}, bytearray(b"a"), array("d", [1.0]), OrderedDict(a=1.0)]
            self.two = list(self.one)
        for container in self.one:
            if isinstance(container, dict):
                container["a"] += 1.0
            elif isinstance(container, set):
                container.add(float(self.global_step))
            else:
                container.append(3)
        return 1 + sum(sum(c.values() if isinstance(c, dict) else c) for c in self.two)


class Tallies(list[int]):
    """Counts its calls by what it holds."""

    def __call__(self) -> int:
        self.append(1)
        return len(self)


def _last(values: list[float]) -> float:
    return values[-1]


class ComesToShareObjects(Small):
    """Objects that training makes, each under two names, of which it uses one at a time."""

    def build(self) -> None:
        self.one: dict[str, Any] = {}
        self.two: dict[str, Any] = {}

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            made = {
                "tensor": torch.ones(2),
                "array": np.ones(2),
                "objects": np.array([[1.0], None], dtype=object),
                "torch": torch.Generator().manual_seed(1),
                "numpy": np.random.default_rng(1),
                "python": random.Random(1),
                **{"count": itertools.count(), "cycle": itertools.cycle([1, 2, 3]), "iterator": iter(range(99))},
                **{"tally": Schedule(), "tallies": Tallies(), "partial": partial(_last, [1.0])},
            }
            self.one, self.two = made, dict(made)
        if not self.one:
            return 1.0
        mine, other = (self.one, self.two) if self.global_step % 2 else (self.two, self.one)
        for name in ("tensor", "array"):
            mine[name] += 1
        mine["objects"][0].append(1.0)
        mine["partial"].args[0].append(float(self.global_step))
        drawn = float(torch.rand((), generator=mine["torch"])) + mine["numpy"].random() + mine["python"].random()
        counted = sum(next(mine[name]) for name in ("count", "cycle", "iterator")) + mine["tally"]() + mine["tallies"]()
        seen = float(other["tensor"].sum() + other["array"].sum()) + len(other["objects"][0]) + other["partial"]()
        return 1 + drawn + counted + seen


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
        self.parts[0].shared["calls"] *= 1.5
        return self.parts[1].shared["calls"]


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
