"""A small module that tests of one process train."""

from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine import TrainingModule


class Net(TrainingModule):
    """One linear layer that learns to give zero for the first part of a batch, by SGD."""

    inputs, lr = 1, 0.1

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(self.inputs, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
