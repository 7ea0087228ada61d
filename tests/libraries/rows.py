"""One row for each program of libraries: a small Lightning module, its data and its callbacks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

try:
    import torchvision
except RuntimeError:  # PyPI's is built for CUDA: beside a torch for CPUs it has no operators, and needs two to import
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401

import lightning as L
from laws.lightning.table import Row as LawRow
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def loader(*tensors: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), **{"batch_size": 4, **options})


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors() -> dict[str, Any]:
    """Return loaders of 24 and 8 vectors of 8 numbers, and a number for each."""
    x, y = draws(32, 8), draws(32, 8).sum(dim=1, keepdim=True)
    return {"train": loader(x[:24], y[:24]), "val": loader(x[24:], y[24:])}


@dataclass
class Row(LawRow):
    """One program, by default on vectors."""

    data: Callable[[], dict[str, Any]] = vectors


class Fitted(L.LightningModule):
    """A net that fits numbers; the base of those that differ in their optimizer or their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.layers()

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)
