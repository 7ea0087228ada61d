"""A module, its data, and a script that trains them: what any version of midstride since the first can run."""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from midstride.engine import BestCheckpoint, DataModule, Trainer, TrainingModule


class Points(DataModule):
    """Whether a point lies in a circle; two workers read it."""

    def setup(self, stage: str) -> None:
        points = 2 * torch.rand(240, 2) - 1
        self.points = TensorDataset(points, (points.norm(dim=1) < 0.8).float())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(_Noisy(self.points), batch_size=10, shuffle=True, num_workers=2)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.points, batch_size=40)


class _Noisy(Dataset[tuple[Tensor, ...]]):
    """Adds noise to each point, drawn where it is read."""

    def __init__(self, points: TensorDataset) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        point, inside = self.points[index]
        return point + 0.1 * torch.randn(2), inside


class Classifier(TrainingModule):
    """Layers that draw, and that keep what they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self.net(batch[0]).squeeze(1), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", F.binary_cross_entropy_with_logits(self.net(batch[0]).squeeze(1), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    strategy, run = sys.argv[1:]
    trainer = Trainer(
        strategy=strategy,
        devices=1 if strategy == "single" else 2,
        max_epochs=3,
        seed=7,
        snapshots={"every_steps": 5},
        callbacks=[BestCheckpoint("val/loss", "min")],
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), Points(), run=run)
