"""State in samplers and streams."""

import dataclasses
import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.utils.prune
from laws.objects.derived import Ranking, Recent
from laws.objects.small import Rows, Small
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler


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
    refused = "Forgetting gives another order when it runs"
    sampler = Forgetting


class SamplesAsked(Samples):
    refused = "the loaders, before the first step, .*sampler.*loads"
    sampler = Asked


class SamplesExpecting(Samples):
    refused = r"copy_\(state(.|\n)*the loaders, after the first step"
    sampler = Expecting


@dataclass(frozen=True)
class Weight:
    """A value that cannot be set."""

    value: float


class Told(Drawing):
    """Holds values that no state_dict has, and nothing else holds it."""

    newest: ClassVar["Told"]
    state_dict = load_state_dict = None

    def __init__(self) -> None:
        super().__init__()
        self.share, self.price, self.day, self.counter = Fraction(1, 3), Decimal("0.1"), date(2026, 1, 1), count(3)
        self.seen, self.recent, self.order = SimpleNamespace(steps=0), Recent([1.0]), Ranking(a=1.0, b=2.0, c=3.0)
        self.totals: Any = defaultdict(lambda: 1.0)
        self.weights, self.later = [Weight(1.0)], 0
        self.leaf = torch.ones(2, requires_grad=True)
        Told.newest = self


class TellsItsSampler(Small):
    """A step that writes to the sampler of its data."""

    def factor(self, batch: Tensor) -> Any:
        told = Told.newest
        told.share, told.price, told.day = told.share / 2, told.price * 3, told.day + timedelta(told.day.day)
        told.seen.steps += next(told.counter)
        told.recent.append(told.recent[-1] + told.seen.steps)
        told.order.move_to_end(next(iter(told.order)))
        told.totals[told.day] += told.recent[-1]
        told.weights.append(Weight(told.weights[-1].value * 0.5))
        told.later = Fraction(told.later + 1)
        (told.leaf * told.leaf).sum().backward()
        assert told.leaf.grad is not None
        numbers = [
            told.share,
            told.price,
            told.day.day,
            told.seen.steps,
            *told.recent,
            told.order[next(iter(told.order))],
        ]
        return sum(map(float, [*numbers, *told.totals.values(), told.weights[-1].value, told.later, *told.leaf.grad]))

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 4, sampler=Told())


@dataclasses.dataclass(frozen=True)
class Bucket:
    first: int


class Row:
    def __init__(self, number: int) -> None:
        self.number, self.drawn = number, 0


class Weighing(Sampler[int]):
    """Counts by keys that are objects: what it draws hangs on them, and on what the step writes to others of them."""

    def __init__(self) -> None:
        self.rows = [Row(number) for number in range(24)]
        self.counts: dict[Bucket, int] = {}
        self.losses: dict[Row, float] = {}
        self.starts = itertools.count()

    def __iter__(self) -> Any:
        start = next(self.starts)
        for row in sorted(self.rows, key=lambda row: (-self.losses.get(row, 0.0), row.number)):
            bucket = Bucket(row.number // 5)
            self.counts[bucket] = self.counts.get(bucket, 0) + 1
            row.drawn += 1
            yield (start + row.number + self.counts[bucket] * row.drawn) % 24

    def __len__(self) -> int:
        return 24


class Weighed(Small):
    """Reads by it."""

    def build(self) -> None:
        self.weighing = Weighing()

    def factor(self, batch: Tensor) -> Any:
        step = int(self.global_step)
        self.weighing.losses[self.weighing.rows[step * 7 % 24]] = float(batch.detach().sum())
        return 1.0

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 12, sampler=self.weighing)


class Stream(IterableDataset[Tensor]):
    """Its state is none that can be written."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        self.position = 0
        for row in Rows().rows:
            self.position += 1
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Streams(Small):
    refused = "lock"

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 4)
