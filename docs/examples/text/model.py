"""A character model: a small GRU that learns to continue a text, letter by letter."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from midstride.engine import DataModule, TrainingModule

__all__ = ["CharacterModel", "Characters"]

TEXT = """
When a run dies, it is not lost: the next attempt reads the newest snapshot, restores the weights, the optimizer and the
random numbers, and continues with the next batch. The order of the batches follows from the seed, the epoch and the
position, so nothing is read twice and nothing is left out. A run that never died ends with the same bits.
"""
LETTERS = sorted(set(TEXT))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: `length` characters, and the same window one character later."""

    def __init__(self, codes: Tensor, length: int) -> None:
        self.codes, self.length = codes, length

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.codes) - self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (length,)."""
        window = self.codes[index : index + self.length + 1]
        return window[:-1], window[1:]


class Characters(DataModule):
    """Windows of TEXT; the last fifth is for validation.

    Args:
        length: characters in a window.
        batch_size: windows in one process's batch.
    """

    def __init__(self, length: int = 24, batch_size: int = 16) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def setup(self, stage: str) -> None:
        """Encode and split the text."""
        codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])
        cut = len(codes) * 4 // 5
        self.training, self.validation = Windows(codes[:cut], self.length), Windows(codes[cut:], self.length)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return shuffled windows."""
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return windows of the last fifth."""
        return DataLoader(self.validation, self.batch_size)


class CharacterModel(TrainingModule):
    """An embedding, a GRU and a linear layer.

    Args:
        hidden: units of the GRU.
        learning_rate: of AdamW.
    """

    def __init__(self, hidden: int = 64, learning_rate: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(len(LETTERS), 16)
        self.gru = nn.GRU(16, hidden, batch_first=True)
        self.head = nn.Linear(hidden, len(LETTERS))

    def forward(self, codes: Tensor) -> Tensor:
        """Return scores of the next character, (batch, length, letters), for `codes` of (batch, length)."""
        scores: Tensor = self.head(self.gru(self.embedding(codes))[0])
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss on characters that training has not seen."""
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross entropy of the next characters."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])

    def continued(self, start: str, count: int = 40) -> str:
        """Return `start` and the `count` most likely next characters."""
        codes = [LETTERS.index(letter) for letter in start]
        with torch.no_grad():
            for _ in range(count):
                codes.append(int(self(torch.tensor([codes]))[0, -1].argmax()))
        return "".join(LETTERS[code] for code in codes)
