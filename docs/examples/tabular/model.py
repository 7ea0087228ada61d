"""A table: rows with a category and numbers, standardized by training statistics, and a net with an embedding."""

import csv
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import DataModule, TrainingModule

__all__ = ["PriceModel", "Prices"]

CITIES = ["Aachen", "Bern", "Cork", "Delft"]


class Prices(DataModule):
    """Prices of flats, in a CSV file that `prepare_data` writes once.

    Args:
        folder: where the file is; all processes read it.
        batch_size: rows in one process's batch.
    """

    def __init__(self, folder: str = str(Path(__file__).parent / ".cache"), batch_size: int = 32) -> None:
        super().__init__()
        self.path, self.batch_size = Path(folder) / "prices.csv", batch_size

    def prepare_data(self) -> None:
        """Write the file, complete or not at all. Replace this by your own export or download."""
        if self.path.exists():
            return
        draw = random.Random(1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["city", "area_m2", "rooms", "price"])
            for _ in range(1000):
                city, area = draw.randrange(len(CITIES)), draw.uniform(30, 150)
                price = area * (30 + 12 * city) + draw.gauss(0, 100)
                writer.writerow([CITIES[city], f"{area:.1f}", round(area / 25), f"{price:.0f}"])
        part.replace(self.path)

    def setup(self, stage: str) -> None:
        """Read, split and standardize the rows."""
        with self.path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        cities = torch.tensor([CITIES.index(row["city"]) for row in rows])
        numbers = torch.tensor([[float(row["area_m2"]), float(row["rooms"]), float(row["price"])] for row in rows])
        mean, deviation = numbers[200:].mean(dim=0), numbers[200:].std(dim=0)
        numbers = (numbers - mean) / deviation
        data = cities, numbers[:, :2], numbers[:, 2]
        self.training = TensorDataset(*(column[200:] for column in data))
        self.validation = TensorDataset(*(column[:200] for column in data))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled rows: cities, (batch,), numbers, (batch, 2), prices, (batch,)."""
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the rows for validation."""
        return DataLoader(self.validation, batch_size=100)


class PriceModel(TrainingModule):
    """An embedding of the city beside the numbers, and two linear layers.

    Args:
        hidden: units of the hidden layer.
        learning_rate: of AdamW.
    """

    def __init__(self, hidden: int = 32, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.city = nn.Embedding(len(CITIES), 4)
        self.net = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 1))

    def forward(self, city: Tensor, numbers: Tensor) -> Tensor:
        """Return standardized prices, (batch,)."""
        prices: Tensor = self.net(torch.cat([self.city(city), numbers], dim=1)).squeeze(1)
        return prices

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the squared error of one batch."""
        city, numbers, price = batch
        loss = F.mse_loss(self(city, numbers), price)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Log the squared error, weighted by rows."""
        city, numbers, price = batch
        self.log("val/loss", F.mse_loss(self(city, numbers), price), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
