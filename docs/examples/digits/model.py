"""Handwritten digits: 1,797 images of 8 x 8 pixels, shifted at random, and a small convolutional net."""

import hashlib
import io
import zipfile
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from midstride.engine import DataModule, TrainingModule

__all__ = ["Classifier", "Digits"]

FILE = "digits.npz"
#: sha256 of the images and labels, as they came from the UCI repository
SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
#: how the images are dealt out; the rest is for training
TEST, VALIDATION = 360, 240


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Images moved by up to `shift` pixels in each direction, newly drawn each time one is read."""

    def __init__(self, images: Tensor, labels: Tensor, shift: int) -> None:
        self.padded = F.pad(images, (shift,) * 4)
        self.labels = labels
        self.shift = shift

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image, (1, 8, 8), and its label."""
        down, right = torch.randint(2 * self.shift + 1, (2,)).tolist() if self.shift else (0, 0)
        return self.padded[index, :, down : down + 8, right : right + 8], self.labels[index]


class Digits(DataModule):
    """scikit-learn's handwritten digits, the same split every time.

    Args:
        folder: folder or fsspec URL that holds the data; every rank reads from it.
        batch_size: images in one rank's batch.
        shift: how far training images are moved at random, in pixels.
    """

    def __init__(
        self, folder: str = str(Path(__file__).parent / ".cache"), batch_size: int = 16, shift: int = 1
    ) -> None:
        super().__init__()
        self.folder, self.batch_size, self.shift = folder, batch_size, shift

    def prepare_data(self) -> None:
        """Write the data to the folder, whole or not at all; do nothing if they are there and intact."""
        try:
            read(self.folder)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
            write(self.folder)
            read(self.folder)

    def setup(self, stage: str) -> None:
        """Read the data and deal them out."""
        images, labels = read(self.folder)
        # One shuffle for all: neighbours in the file were written by the same hand.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
        self.images, self.labels = images[order], labels[order]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the training images, shifted."""
        first = TEST + VALIDATION
        return DataLoader(Shifted(self.images[first:], self.labels[first:], self.shift), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the images that choose the best epoch."""
        part = slice(TEST, TEST + VALIDATION)
        return DataLoader(TensorDataset(self.images[part], self.labels[part]), batch_size=120)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the images that are looked at once, at the end."""
        return DataLoader(TensorDataset(self.images[:TEST], self.labels[:TEST]), batch_size=120)


class Classifier(TrainingModule):
    """Three convolutions and two linear layers; dropout after each half.

    Args:
        channels: of the first convolution.
        hidden: units of the hidden linear layer.
        learning_rate: of the first epoch; it falls to nothing along half a cosine.
    """

    def __init__(self, channels: int = 24, hidden: int = 128, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the ten digits, (batch, 10)."""
        scores: Tensor = self.net(images)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log what one batch adds to the validation's loss and accuracy."""
        self._judge("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log what one batch adds to the test's loss and accuracy."""
        self._judge("test", *batch)

    def _judge(self, stage: str, images: Tensor, labels: Tensor) -> None:
        scores = self(images)
        values = {
            f"{stage}/loss": F.cross_entropy(scores, labels),
            f"{stage}/accuracy": (scores.argmax(dim=1) == labels).float().mean(),
        }
        self.log_dict(values, on_epoch=True, sync_dist=True, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        """Return AdamW, and a learning rate that falls after each epoch until the last."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        epochs = self.trainer.options.max_epochs or 40
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)]


def read(folder: str) -> tuple[Tensor, Tensor]:
    """Return the images, (1797, 1, 8, 8) in 0..1, and labels, (1797,), from `folder`.

    Raises:
        ValueError: the file there holds something else.
    """
    with fsspec.open(f"{folder}/{FILE}", "rb") as file:
        arrays = np.load(io.BytesIO(file.read()))
        images, labels = arrays["images"], arrays["labels"]
    found = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{folder}/{FILE} is damaged: sha256 {found}, not {SHA256}; remove it and prepare the data again"
        )
    return torch.from_numpy(images).unsqueeze(1).float() / 16, torch.from_numpy(labels).long()


def write(folder: str) -> None:
    """Write the data to `folder`: first under another name, so that no reader ever sees half a file."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    content = io.BytesIO()
    np.savez(content, images=images.reshape(-1, 8, 8).astype(np.uint8), labels=labels.astype(np.uint8))
    filesystem, path = fsspec.url_to_fs(folder)
    filesystem.makedirs(path, exist_ok=True)
    part = f"{path}/{FILE}.{uuid4().hex}"
    filesystem.pipe_file(part, content.getvalue())
    filesystem.mv(part, f"{path}/{FILE}")
