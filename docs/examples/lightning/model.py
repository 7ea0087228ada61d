"""A LightningModule and a LightningDataModule, unchanged, with a callback of their own."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["LitRegressor", "WaveData"]


class WaveData(L.LightningDataModule):
    """Points of a noisy sine wave."""

    def __init__(self, points: int = 800, batch_size: int = 32) -> None:
        super().__init__()
        self.points, self.batch_size = points, batch_size

    def setup(self, stage: str) -> None:
        """Draw the points from a generator of their own, the same in all processes."""
        draw = torch.Generator().manual_seed(1)
        x = 6 * torch.rand(self.points, 1, generator=draw)
        y = x.sin() + 0.1 * torch.randn(self.points, 1, generator=draw)
        cut = self.points // 5
        self.training, self.validation = TensorDataset(x[cut:], y[cut:]), TensorDataset(x[:cut], y[:cut])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled points."""
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the points for validation."""
        return DataLoader(self.validation, self.batch_size)


class LitRegressor(L.LightningModule):
    """Two linear layers with dropout, and a schedule over all steps."""

    def __init__(self, hidden: int = 32, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Dropout(0.05), nn.Linear(hidden, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the squared error of one batch."""
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the squared error."""
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return AdamW with a one-cycle schedule."""
        rate = self.hparams["learning_rate"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
