"""What user code keeps beside objects: in functions, their caches, on classes, in enumerations, the environment."""

import contextvars
import enum
import functools
import os
import sqlite3
import weakref
from typing import Any

import torch
from laws.objects.small import Small
from torch import Tensor
from torch.nn import functional


def remember(value: float, seen: list[float] = []) -> int:  # noqa: B006 - as users write it
    seen.append(value)
    return len(seen)


class InDefault(Small):
    warns = "part of no snapshot: function remember: seen holds"

    def factor(self, batch: Tensor) -> Any:
        return remember(float(batch.sum()))


class InOwnDefault(Small):
    """In a default of one of its methods."""

    warns = r"part of no snapshot: function InOwnDefault\.factor: seen\['calls'\] \(0, now 1"

    def factor(self, batch: Tensor, seen: dict[str, int] = {"calls": 0}) -> Any:  # noqa: B006
        seen["calls"] += 1
        return seen["calls"]


def tick() -> int:
    tick.calls += 1
    return int(tick.calls)


tick.calls = 0


class OnFunction(Small):
    warns = r"part of no snapshot: function tick: calls \(0, now 1"

    def factor(self, batch: Tensor) -> Any:
        return tick()


class PerOwner:
    """A descriptor that keeps a value for each object that asks."""

    def __init__(self) -> None:
        self.values: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.values.get(owner, 0.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.values[owner] = value


class InDescriptor(Small):
    warns = r"part of no snapshot: class InDescriptor: gain\.values"
    gain = PerOwner()

    def factor(self, batch: Tensor) -> Any:
        self.gain = self.gain + 1
        return self.gain


class Phase(enum.Enum):
    WARM = 1

    def __init__(self, number: int) -> None:
        self.seen = 0


class InEnum(Small):
    warns = r"class Phase: WARM\.seen \(0, now 1"

    def factor(self, batch: Tensor) -> Any:
        Phase.WARM.seen += 1
        return Phase.WARM.seen


class Shared:
    """One object for all who make it."""

    _made: Any = None
    calls = 0

    def __new__(cls) -> "Shared":
        cls._made = cls._made or super().__new__(cls)
        return cls._made


class InSingleton(Small):
    warns = "class Shared: _made"

    def factor(self, batch: Tensor) -> Any:
        Shared().calls += 1
        return Shared().calls


DEPTH = contextvars.ContextVar("DEPTH", default=0)


class InContext(Small):
    warns = r"global .*DEPTH \(None, now 1"

    def factor(self, batch: Tensor) -> Any:
        DEPTH.set(DEPTH.get() + 1)
        return DEPTH.get()


class Louder(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Louder.calls += 1
        return x * Louder.calls

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class OnAutogradFunction(Small):
    warns = r"class Louder: calls \(0, now 1"

    def factor(self, batch: Tensor) -> Any:
        return 1 + Louder.apply(batch).mean()


@functools.lru_cache
def direction(number: int) -> Tensor:
    return torch.rand(number)


class InCache(Small):
    """Caches what a function draws."""

    warns = r"global .*\.direction \(0 results cached, now 1"

    def factor(self, batch: Tensor) -> Any:
        return 1 + direction(1)


class InCacheOfMethod(Small):
    warns = r"InCacheOfMethod: scale \(0 results cached, now 1"

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def scale(self, number: int) -> float:
        return float(torch.rand(()))

    def factor(self, batch: Tensor) -> Any:
        return 1 + self.scale(0)


class InEnvironment(Small):
    warns = r"environment variable FACTOR_CALLS \(missing, now"

    def factor(self, batch: Tensor) -> Any:
        calls = int(os.environ.get("FACTOR_CALLS", "0")) + 1
        os.environ["FACTOR_CALLS"] = str(calls)
        return calls


class InSettings(Small):
    warns = r"part of no snapshot: torch\.get_float32_matmul_precision\(\) \('highest', now 'high'\)"

    def factor(self, batch: Tensor) -> Any:
        torch.set_float32_matmul_precision("high")
        return 1.0


class InLibrary(Small):
    """A function of a library is another one from the second step on."""

    warns = r"library function torch\.nn\.functional\.relu \(torch\.nn\.functional:relu, now \S+:elu\)"

    def factor(self, batch: Tensor) -> Any:
        return functional.relu(batch - 0.5).sum()

    def on_train_batch_end(self, *arguments: Any) -> None:
        functional.relu = functional.elu

    def on_fit_end(self) -> None:
        functional.relu = RELU


RELU = functional.relu


class InDatabase(Small):
    warns = "attribute rows, a Connection, is not part of snapshots"

    def build(self) -> None:
        self.rows = sqlite3.connect(":memory:")
        self.rows.execute("create table steps (step)")

    def factor(self, batch: Tensor) -> Any:
        self.rows.execute("insert into steps values (1)")
        return self.rows.execute("select count(*) from steps").fetchone()[0]


GRAPH = torch.eye(3).to_sparse()


class InSparseGlobal(Small):
    warns = r"snapshot: global .*GRAPH \(float32\[3, 3\]"

    def factor(self, batch: Tensor) -> Any:
        GRAPH.mul_(2)
        return GRAPH.sum()


act = torch.relu
KINDS: dict[str, Any] = {"act": torch.nn.ReLU}


class SwapsBuiltin(Small):
    """A function of C that a global names."""

    warns = r"snapshot: global \S+\.act \(torch:\S+\.relu, now torch:\S+\.tanh\)"

    def factor(self, batch: Tensor) -> Any:
        return act(batch).sum()

    def on_train_batch_end(self, *arguments: Any) -> None:
        globals()["act"] = torch.tanh


class SwapsClass(Small):
    """A class that a container names, and one that a class does."""

    warns = (
        r"snapshot: class SwapsClass: norm \(\S+:LayerNorm, now \S+:RMSNorm\), global \S+\.KINDS\['act'\] "
        r"\(\S+:ReLU, now \S+:GELU\)"
    )
    norm: type = torch.nn.LayerNorm

    def factor(self, batch: Tensor) -> Any:
        return KINDS["act"]()(batch).sum() + self.norm(2)(batch).sum()

    def on_train_batch_end(self, *arguments: Any) -> None:
        KINDS["act"], type(self).norm = torch.nn.GELU, torch.nn.RMSNorm
