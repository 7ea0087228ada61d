"""Small training with fragile state: dropout, momentum, a schedule, a shuffled loader."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine.modules.module import DataModule, TrainingModule

__all__ = ["EPOCHS", "STEPS", "SmallData", "SmallModule"]

EPOCHS = 2
#: of both epochs
STEPS = 8


class SmallModule(TrainingModule):
    """Two layers with dropout; logs its losses and its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Any:
        """Return logits (N, 3) of features (N, 6)."""
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of a batch, and which ranks logged it."""
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)
        self.log("val/rank", float(self.global_rank), sync_dist=True, reduce_fx="max")

    def configure_optimizers(self) -> Any:
        """Return Adam, and a learning rate that drops in the middle of each epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SmallData(DataModule):
    """Four shuffled batches per epoch and rank, the last one smaller; six validation samples."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of four."""
        return DataLoader(_samples(STEPS // EPOCHS * 4 * self.ranks - 1), batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Batches of two."""
        return DataLoader(_samples(6), batch_size=2)


def _samples(count: int) -> TensorDataset:
    features = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
    return TensorDataset(features, torch.arange(count) % 3)
