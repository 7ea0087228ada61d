"""A small transformer whose blocks are sharded one by one."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import DataModule, TrainingModule

__all__ = ["Sorted", "Transformer"]


class Sorted(DataModule):
    """Sequences of digits; the target is the sorted sequence.

    Args:
        sequences: to train on.
        length: digits in a sequence.
        batch_size: sequences in one process's batch.
    """

    def __init__(self, sequences: int = 512, length: int = 8, batch_size: int = 16) -> None:
        super().__init__()
        self.sequences, self.length, self.batch_size = sequences, length, batch_size

    def setup(self, stage: str) -> None:
        """Draw the sequences from a generator of their own, the same in all processes."""
        draw = torch.Generator().manual_seed(1)
        digits = torch.randint(10, (self.sequences + 128, self.length), generator=draw)
        data = TensorDataset(digits, digits.sort(dim=1).values)
        self.training = torch.utils.data.Subset(data, range(128, len(data)))
        self.validation = torch.utils.data.Subset(data, range(128))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled sequences: inputs and targets, both (batch, length)."""
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the sequences for validation."""
        return DataLoader(self.validation, self.batch_size)


class Transformer(TrainingModule):
    """Encoder blocks in an `nn.ModuleList`: each one is a unit of sharding.

    Args:
        width: of the embedding.
        blocks: number of blocks.
        learning_rate: of AdamW.
    """

    def __init__(self, width: int = 32, blocks: int = 3, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.position = nn.Embedding(10, width), nn.Embedding(64, width)
        layer = {"nhead": 4, "dim_feedforward": 2 * width, "dropout": 0.1, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, **layer) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, digits: Tensor) -> Tensor:
        """Return scores, (batch, length, 10), for `digits` of (batch, length)."""
        hidden = self.embedding(digits) + self.position(torch.arange(digits.shape[1], device=digits.device))
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss on sequences that training has not seen."""
        inputs, targets = batch
        self.log("val/loss", F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten()), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over this process's shards."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
