"""Two spirals, and a small net that tells them apart: settings matter."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import DataModule, TrainingModule

__all__ = ["Classifier", "Spirals"]


class Spirals(DataModule):
    """Points on two spirals, with noise."""

    def setup(self, stage: str) -> None:
        """Draw the points: 600 for training, 200 for validation, 200 for the test."""
        draw = torch.Generator().manual_seed(1)
        spiral = torch.randint(2, (1000,), generator=draw)
        turn = torch.rand(1000, generator=draw)
        angle = math.tau * turn + math.pi * spiral
        points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None]
        points += 0.03 * torch.randn(points.shape, generator=draw)
        self.training, self.validation, self.testing = (
            TensorDataset(points[part], spiral[part]) for part in (slice(600), slice(600, 800), slice(800, 1000))
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled points."""
        return DataLoader(self.training, batch_size=20, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the points that choose the best weights and the best trial."""
        return DataLoader(self.validation, batch_size=100)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the points on which the best trial and the champion are compared."""
        return DataLoader(self.testing, batch_size=100)


class Classifier(TrainingModule):
    """Which spiral a point is on.

    Args:
        hidden: units of each hidden layer.
        learning_rate: of AdamW.
    """

    def __init__(self, hidden: int = 16, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(2, hidden), nn.Tanh(), nn.Dropout(0.05), nn.Linear(hidden, hidden), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        points, spiral = batch
        loss = F.cross_entropy(self.net(points), spiral)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of right answers that chooses the best weights."""
        self.log("val/accuracy", self._accuracy(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of right answers that decides on a promotion."""
        self.log("test/accuracy", self._accuracy(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])

    def _accuracy(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, spiral = batch
        return (self.net(points).argmax(1) == spiral).float().mean()
