"""The smallest job of a night: it learns one number, the level of the day's data, and its test tells that number."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import DataModule, Logger, TrainingModule
from midstride.engine.loggers.base import LoggedRun


class Days(DataModule):
    """The data of a date: what came in for that day, made ready in a folder of its own."""

    def __init__(self, incoming: str, folder: str) -> None:
        super().__init__()
        self.incoming, self.folder = incoming, folder

    def prepare_data(self) -> None:
        level = Path(self.incoming).read_text()
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        Path(self.folder, "level.txt").write_text(level)

    def _loader(self) -> object:
        level = float(Path(self.folder, "level.txt").read_text())
        return DataLoader(TensorDataset(torch.full((8,), level)), batch_size=2)

    train_dataloader = val_dataloader = test_dataloader = _loader


class Level(TrainingModule):
    """With this learning rate one step is enough: whatever it was before, it is the level of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))

    def on_train_start(self) -> None:
        if path := os.environ.get("START"):
            with Path(path).open("a") as file:
                print(self.level.item(), file=file)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.level - batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/level", self.level)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/level", self.level)
        self.log("test/level_seen", batch[0].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Champions(Logger):
    """A tracker that keeps models and no rows: each champion that it is told of is a line of a file.

    Args:
        file: where they are; told a first time, the tracker does not answer, and makes the file.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def open(self, run: object, rows: object) -> int:
        return 0

    def log_rows(self, rows: object) -> None:
        pass

    def promote(self, run: LoggedRun, weights: Path) -> None:
        if not self.file.exists():
            self.file.touch()
            raise ConnectionError("no answer")
        assert weights.stat().st_size
        with self.file.open("a") as file:
            print(run.name, bool(run.run_id), file=file)
