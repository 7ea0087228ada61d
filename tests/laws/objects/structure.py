"""Layers, parameters and buffers that come up in training."""

import copy
from typing import Any

import torch
import torch.fx
import torch.nn.utils.prune
from laws.objects.attributes import Part
from laws.objects.small import Rows, Small
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Callback


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


class Traced(Small):
    """A layer that torch.fx traced; its graph is as the code builds it."""

    def build(self) -> None:
        self.traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2)))

    def factor(self, batch: Tensor) -> Any:
        return self.traced(batch).mean()


class Retraced(Traced):
    """Its graph gets a node in training."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.global_step == 1:
            with self.traced.graph.inserting_after():
                self.traced.graph.placeholder("other", default_value=None)


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


class Moved(Small):
    """Layers that change places, parameters that are replaced, buffers that come together and apart, other strides."""

    def build(self) -> None:
        self.one, self.two, self.head = (nn.Linear(2, 2) for _ in range(3))
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", self.first)
        self.register_buffer("third", torch.zeros(2))

    def factor(self, batch: Tensor) -> Any:
        self.one, self.two = self.two, self.one
        if self.global_step == 1:
            self.head.weight = nn.Parameter(self.head.weight.detach() * 2)
            self.two.weight.data = torch.randn(2, 2).t()
            self.second, self.third = self.first.clone(), self.first
        self.first += 1
        self.second += 2
        self.third += 3
        kept = self.first.sum() + self.second.sum() + self.third.sum() + self.one.weight.stride()[0]
        return 1 + kept + self.head(self.two(self.one(batch).relu())).square().mean()


class LateUnderValidation(Small):
    """A layer that comes up in training, and a snapshot is taken while the module is in evaluation."""

    def build(self) -> None:
        self.backup: Any = None

    def factor(self, batch: Tensor) -> Any:
        if self.backup is None:
            self.backup = nn.Sequential(copy.deepcopy(self.layer), nn.Dropout(0.5))
            self.backup[0].eval()
        return 1 + self.backup(batch).mean().detach()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).mean())

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), 4)


class Tied(Small):
    """A weight that comes to be another one in training."""

    def build(self) -> None:
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def factor(self, batch: Tensor) -> Any:
        self.two.weight = self.one.weight
        return 1 + self.two(self.one(batch)).square().mean()


class Halving(nn.Linear):
    share = 0.5


class Doubling(Halving):
    share = 2.0


class Louder(Rows):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * 3


class Reclassed(Small):
    """A layer and a data set become of another class, and the layer goes back."""

    def build(self) -> None:
        self.inner: nn.Module = Halving(2, 2)
        self.plain, self.rows = nn.Sequential(nn.ReLU()), Rows()

    def factor(self, batch: Tensor) -> Any:
        self.inner.__class__ = Doubling if self.global_step < 4 else Halving
        self.plain[0].__class__ = nn.Tanh
        self.rows.__class__ = Louder
        return self.inner.share + self.plain(batch).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True)


class Rising(Callback):
    factor = 1.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.__class__ = Risen
        trainer.optimizers[0].param_groups[0]["lr"] *= self.factor


class Risen(Rising):
    factor = 1.5
