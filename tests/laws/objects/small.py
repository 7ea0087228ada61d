"""A small module and its data, which the others of this folder extend."""

import threading
from typing import Any

import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import TrainingModule


def held_lock() -> Any:
    """Return a lock that is held: no file can hold that."""
    lock = threading.Lock()
    lock.acquire()
    return lock


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
    """Trains a layer; each row adds to its loss what it keeps, and may have a loader."""

    loader: Any

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
        return self.loader if hasattr(self, "loader") else DataLoader(Rows(), 4, shuffle=True)
