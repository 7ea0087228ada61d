"""What training puts on its device, and takes from there."""

from typing import Any

import torch
from laws.objects.small import Small
from laws.objects.structure import Averaged
from torch import Tensor, nn


class Moves(Small):
    """A tensor built on the host, which training has on the device."""

    def build(self) -> None:
        self.average = torch.zeros(2)

    def factor(self, batch: Tensor) -> Any:
        self.average = self.average.to(self.device) * 0.9 + batch.mean(0)
        return 1 + self.average.sum()


class MovesBack(Small):
    """A tensor that each attempt sets up on the device, and that training has on the host."""

    def on_fit_start(self) -> None:
        self.sums = torch.zeros(2, device=self.device)

    def factor(self, batch: Tensor) -> Any:
        self.sums = self.sums.cpu() + 1.5
        return float(self.sums.sum())


class Collects(Small):
    """Tensors that come up in training, in containers."""

    def build(self) -> None:
        self.last: Tensor | None = None
        self.means: dict[str, list[Tensor]] = {}

    def factor(self, batch: Tensor) -> Any:
        mean = batch.mean(0)
        self.last = mean if self.last is None else self.last * 0.5 + mean
        self.means.setdefault("batch", []).append(mean)
        return 1 + self.last.sum() + sum(float(mean.sum()) for mean in self.means["batch"])


class LeafOnDevice(Small):
    """A tensor with gradients that is no parameter."""

    def build(self) -> None:
        self.scale: Any = None

    def factor(self, batch: Tensor) -> Any:
        if self.scale is None:
            self.scale = torch.ones(2, device=self.device, requires_grad=True)
        if self.scale.grad is not None:
            with torch.no_grad():
                self.scale -= 0.1 * self.scale.grad
        return (batch.mean(0) * self.scale).sum() + 2


class Registers(Small):
    """Buffers that come up late, one on the device and one on the host."""

    def factor(self, batch: Tensor) -> Any:
        if not hasattr(self, "there"):
            self.register_buffer("there", torch.zeros(2, device=self.device))
            self.register_buffer("here", torch.zeros(2))
        self.there = self.there + batch.mean(0)
        self.here += 1
        return 1 + self.there.sum() + float(self.here.sum())


class Hides(Small):
    """A parameter that the module does not know of."""

    def build(self) -> None:
        self.hidden = [nn.Parameter(torch.ones(2))]

    def factor(self, batch: Tensor) -> Any:
        if self.hidden[0].device != self.device:
            self.hidden[0] = nn.Parameter(self.hidden[0].detach().to(self.device))
        with torch.no_grad():
            self.hidden[0] += 0.5
        return 1 + (self.hidden[0].detach() * batch.mean(0)).sum()


class Fills(Small):
    """A learning rate on the device, which is filled there."""

    def factor(self, batch: Tensor) -> Any:
        group = self.trainer.optimizers[0].param_groups[0]
        assert group["lr"].device == self.device
        group["lr"].mul_(0.9)
        return 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.01, device=self.device))


#: name -> module
ON_DEVICE: dict[str, type[Small]] = {
    kind.__name__: kind for kind in (Moves, MovesBack, Collects, LeafOnDevice, Averaged, Registers, Hides, Fills)
}
