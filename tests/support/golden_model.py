"""A module that keeps one thing of each kind a snapshot can describe, and fails once, after five steps."""

import enum
import itertools
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import DataModule, EarlyStopping, TrainingModule


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int


class Part:
    def __init__(self) -> None:
        self.seen = 0


def double(value: int) -> int:
    return 2 * value


class Net(TrainingModule):
    def __init__(self, mark: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.error = torchmetrics.MeanSquaredError()
        self.parts: dict[str, Any] = {
            "cursor": iter([1, 2, 3]),
            "dict": defaultdict(lambda: 0),
            "enum": Color.RED,
            "function": double,
            "count": itertools.count(2),
            "generator": torch.Generator(),
            "method": self.log,
            "named tuple": Point(1),
            "object": Part(),
            "opaque": EarlyStopping("val/loss"),
            "partial": partial(double, 2),
            "set": {1, 2},
            "value": range(3),
        }

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 5 and not (mark := Path(self.hparams["mark"])).exists():
            mark.touch()
            raise ValueError("once")
        self.cache += 1
        self.parts["object"].seen += 1
        loss: Tensor = self.layer(batch).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.error(self.layer(batch).flatten(), batch.sum(1))
        self.log("val/error", self.error)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1


class Rows(Dataset[Tensor]):
    """Counts what is read of it, beside what is too large for a snapshot."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {"rows": [torch.randn(2) for _ in range(2000)], "count": 0}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.read["count"] += 1
        row: Tensor = self.read["rows"][index]
        return row


class Data(DataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(), batch_size=3, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(), batch_size=6)
