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
        self.late += 1
        return 1 + self.memory.sum() + self.late


class Traced(Small):
    """A layer that torch.fx traced; its graph is as the code builds it."""

    def build(self) -> None:
        self.traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2)))

    def factor(self, batch: Tensor) -> Any:
        return self.traced(batch).mean()


class Retraced(Traced):
    """Its graph gets a node in training."""

    warns = r"set in training to .* module\.traced\._graph \(now torch\.fx\.graph:Graph, of other code\)"

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
        self.head[2].shared["calls"] += 1
        return sum(parameter.sum() for parameter in self.extra) + self.head[:2](batch).sum()


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

    refused = "training has tied the parameter two.weight to one.weight"

    def build(self) -> None:
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def factor(self, batch: Tensor) -> Any:
        self.two.weight = self.one.weight
        return 1 + self.two(self.one(batch)).square().mean()


class Frozen(Tied):
    """A parameter that becomes a buffer."""

    refused = "the parameter one.weight existed when training"

    def factor(self, batch: Tensor) -> Any:
        weight = self.one.weight.detach()
        del self.one.weight
        self.one.register_buffer("weight", weight)
        return 1 + self.one(batch).square().mean()


class Untied(Small):
    """Weights built as one of which some become their own: one that the optimizer gets, two together, the first."""

    def build(self) -> None:
        self.tied = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        self.pair = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        for layers in (self.tied, self.pair):
            for layer in layers[1:]:
                layer.weight = layers[0].weight

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            _, alone, *others = self.tied
            alone.weight = nn.Parameter(alone.weight.detach() * 2)
            self.optimizers().add_param_group({"params": [alone.weight], "lr": 0.02})
            others[0].weight = others[1].weight = nn.Parameter(alone.weight.detach() * 2)
            self.pair[0].weight = nn.Parameter(self.pair[0].weight.detach() * 3)
        together = self.tied[2].weight is self.tied[3].weight
        return 1 + together + sum(layer(batch).square().mean() for layer in [*self.tied, *self.pair])


class Shedding(Small):
    """Layers without parameters that go, as names and as None, from a list and within a dict, whose order changes."""

    def build(self) -> None:
        self.steps = nn.ModuleList([nn.ReLU(), nn.Tanh(), nn.Dropout(0.4)])
        self.gone, self.emptied = nn.Dropout(0.3), nn.BatchNorm1d(2, affine=False)
        self.emptied.register_buffer("mask", torch.ones(2), persistent=False)
        self.named = nn.ModuleDict({"first": nn.Tanh(), "second": nn.Dropout(0.2), "third": nn.ReLU()})
        self.head: Any = None

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 0:
            self.head = nn.Dropout(0.1)
        if self.global_step == 1:
            self.steps.pop(1)
            del self.gone, self.named["third"]
            self.emptied = self.head = None
            self.named["first"] = self.named.pop("first")
        if self.global_step == 3:
            self.gone = nn.Tanh()
        layers = [*self.steps, *self.named.values(), getattr(self, "gone", None), self.emptied, self.head]
        for layer in filter(None, layers):
            batch = layer(batch + 1)
        return 1 + batch.mean()


class Joined(Small):
    """Layers that come to be one, and one that comes to be two."""

    def build(self) -> None:
        self.one, self.two = nn.Dropout(0.2), nn.Dropout(0.6)
        self.student = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        self.teacher, self.noise = self.student, self.one

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            self.two, self.noise = self.one, nn.Dropout(0.5)
            self.teacher = copy.deepcopy(self.student)
            self.late = nn.Sequential(self.one, nn.Tanh())
            self.again = self.late
        self.two.p *= 0.9
        taught = self.two(self.one(batch)) + self.noise(batch)
        if self.global_step > 1:
            taught = self.again(taught) + self.late(taught)
        return 1 + (self.student(taught) - self.teacher(taught).detach()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.layer.parameters(), *self.student.parameters()], lr=0.01, momentum=0.9)


class Discarding(Small):
    """Buffers that go, as names and as None, and those that come to be persistent, or no more."""

    def build(self) -> None:
        for name in ("gone", "emptied", "passing"):
            self.register_buffer(name, torch.ones(2))
        self.register_buffer("staying", torch.ones(2), persistent=False)

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            del self.gone
            self.emptied = None
            self.register_buffer("passing", torch.full((2,), 3.0), persistent=False)
            self.register_buffer("staying", torch.full((2,), 4.0))
        found = [getattr(self, name, None) for name in ("gone", "emptied", "passing", "staying")]
        self.passing += 1
        self.staying += 2
        return sum(buffer.sum() for buffer in found if buffer is not None) + len(self.state_dict())


class Learning(Small):
    """A buffer and a None that come to be parameters."""

    def build(self) -> None:
        self.register_buffer("shift", torch.ones(2))
        self.scale: Any = None

    def factor(self, batch: Tensor) -> Any:
        if self.scale is None:
            del self.shift
            self.shift, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.optimizers().add_param_group({"params": [self.shift, self.scale], "lr": 0.02})
        return (batch * self.scale + self.shift).square().mean()


class Expanded(Small):
    """Buffers whose numbers share memory."""

    def build(self) -> None:
        self.register_buffer("mask", torch.ones(1, 1).expand(4, 2), persistent=False)
        self.register_buffer("kept", torch.ones(1, 1).expand(4, 2))
        self.register_buffer("shared", self.kept)

    def factor(self, batch: Tensor) -> Any:
        self.mask = (self.mask[:1] * 1.5).expand(4, 2)
        return (batch * self.mask + self.kept * self.shared).square().mean() + self.mask.stride()[0]


class DropsInValidation(Small):
    """Dropout that its validation puts into training mode at its start: the net stays in evaluation."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Dropout(0.5))

    def factor(self, batch: Tensor) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.net[1].train()
        self.log("val", self.net(batch).mean())

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), 4)


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


class SharesMemory(Small):
    """Parameters come to share memory in training, one of them in part."""

    def build(self) -> None:
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1, bias=False)
        self.c.weight.data = self.b.weight.data[:1]

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            self.tell()
        return (self.b(torch.tanh(self.a(batch))).square().mean() + self.c(batch).square().mean()) * self.shared()

    def shared(self) -> int:
        a, b, c = (one.weight.data_ptr() for one in (self.a, self.b, self.c))
        return 1 + (a == b) + 2 * (b == c) + 4 * (a + 8 == c)

    def tell(self) -> None:
        self.b.weight.data = self.a.weight.data
        self.c.weight.data = self.a.weight.data[1:]


class SharesNoMore(SharesMemory):
    """Parameters that shared memory get memory of their own in training."""

    def tell(self) -> None:
        self.c.weight.data = self.c.weight.data.clone()
