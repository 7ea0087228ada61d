"""Whether a point lies in a circle: a module and its data, to put your own in their place."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import DataModule, TrainingModule

Batch = tuple[Tensor, Tensor]


class Circle(DataModule):
    """Points of a square, and whether they lie in the circle.

    Args:
        points: how many.
        batch_size: points in one rank's batch.
    """

    def __init__(self, points: int = 3200, batch_size: int = 32) -> None:
        super().__init__()
        self.points, self.batch_size = points, batch_size

    def setup(self, stage: str) -> None:
        """Make the points: seeded, the same in every process and after every restart."""
        points = 2 * torch.rand(self.points, 2) - 1
        inside = (points.norm(dim=1) < 0.8).float()
        self.training = TensorDataset(points[800:], inside[800:])
        self.validation = TensorDataset(points[:400], inside[:400])
        self.test = TensorDataset(points[400:800], inside[400:800])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the training data."""
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the data that choose the best weights."""
        return DataLoader(self.validation, batch_size=200)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the data that test the best weights at the end."""
        return DataLoader(self.test, batch_size=200)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the data of `midstride predict`."""
        return self.test_dataloader()


class Classifier(TrainingModule):
    """Two linear layers.

    Args:
        hidden: units between them.
        learning_rate: of Adam.
    """

    def __init__(self, hidden: int = 64, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, hidden), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(hidden, 1)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Return scores, (batch,), for `points`, (batch, 2): positive inside the circle."""
        scores: Tensor = self.net(points).squeeze(1)
        return scores

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        points, inside = batch
        loss = F.binary_cross_entropy_with_logits(self(points), inside)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the accuracy on the validation's points."""
        self.log("val/accuracy", self._accuracy(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the accuracy on the test's points."""
        self.log("test/accuracy", self._accuracy(batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the probability that each point lies inside, (batch,)."""
        scores: Tensor = self(batch[0])
        return scores.sigmoid()

    def _accuracy(self, batch: Batch) -> Tensor:
        points, inside = batch
        right: Tensor = (self(points) > 0) == inside.bool()
        return right.float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
