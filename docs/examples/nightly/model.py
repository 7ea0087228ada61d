"""Demand of one day by the hour: data that arrive each day, and a model that is retrained on them each night."""

import csv
import math
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import DataModule, TrainingModule

__all__ = ["Demand", "Forecast"]


class Demand(DataModule):
    """Demand of one date, in a CSV file that `prepare_data` writes once.

    Args:
        folder: of that date; all processes read it.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.path = Path(folder) / "demand.csv"

    def prepare_data(self) -> None:
        """Write the file, complete or not at all. Replace this by your own export or download."""
        if self.path.exists():
            return
        draw = random.Random(str(self.path.parent.name))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.writer(file)
            for _ in range(600):
                hour = draw.uniform(0, 24)
                writer.writerow([f"{hour:.2f}", f"{math.sin(hour / 24 * math.tau) + draw.gauss(0, 0.1):.4f}"])
        part.replace(self.path)

    def setup(self, stage: str) -> None:
        """Read and split the rows: hours and demand, both (rows, 1)."""
        with self.path.open(newline="") as file:
            rows = torch.tensor([[float(value) for value in row] for row in csv.reader(file)])
        data = TensorDataset(rows[:, :1] / 24, rows[:, 1:])
        parts = [range(200, 600), range(100, 200), range(100)]
        self.training, self.validation, self.testing = (torch.utils.data.Subset(data, part) for part in parts)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled rows."""
        return DataLoader(self.training, batch_size=20, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the rows that choose the best weights."""
        return DataLoader(self.validation, batch_size=50)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the rows on which challenger and champion are compared."""
        return DataLoader(self.testing, batch_size=50)


class Forecast(TrainingModule):
    """Demand as a function of the hour.

    Args:
        hidden: units of the hidden layer.
        learning_rate: of AdamW.
    """

    def __init__(self, hidden: int = 32, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the squared error of one batch."""
        hour, demand = batch
        loss = F.mse_loss(self.net(hour), demand)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the squared error that chooses the best weights."""
        hour, demand = batch
        self.log("val/loss", F.mse_loss(self.net(hour), demand), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the squared error that decides on a promotion."""
        hour, demand = batch
        self.log("test/loss", F.mse_loss(self.net(hour), demand), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
