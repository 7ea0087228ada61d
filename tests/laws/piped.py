"""A module whose layers are cut into stages."""

from typing import Any

import torch
import torchmetrics
from laws.lives import note_samples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from midstride.engine import TrainingModule


class Piped(TrainingModule):
    """Layers in a row, with dropout and batch norm; the loss of each part is made where they end."""

    def __init__(self) -> None:
        super().__init__()
        # Two values a channel: a part of a batch may be a single sample.
        self.sequential_module = nn.Sequential(
            *(nn.Linear(6, 40), nn.Unflatten(1, (20, 2)), nn.BatchNorm1d(20), nn.Flatten(), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Linear(40, 5), nn.Tanh(), nn.Linear(5, 3)),
        )
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x: Tensor) -> Any:
        return self.sequential_module(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        note_samples(self, batch[2])
        return self(batch[0])

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = cross_entropy(outputs, batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train/own", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0])
        self.log("val/loss", cross_entropy(outputs, batch[1]), sync_dist=True)
        self.accuracy.update(outputs, batch[1])
        self.log("val/accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
