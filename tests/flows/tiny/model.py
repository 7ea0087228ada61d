"""The smallest job that has all it takes: dropout, random data, several epochs, a validation, a test."""

import os
import shutil
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import DataModule, Logger, TrainingModule


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Numbers to tell apart by their sum, moved a little each time they are read."""

    def __init__(self, samples: int, seed: int) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(8), (self.x[index].sum() > 0).long()


class Data(DataModule):
    """Counts how often it was prepared."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def prepare_data(self) -> None:
        Path(self.folder).mkdir(exist_ok=True)
        with Path(f"{self.folder}.prepared").open("a") as count:
            count.write("x")
        Path(self.folder, "data.txt").write_text("here")

    def train_dataloader(self) -> object:
        return DataLoader(Noise(96, 1), batch_size=4, shuffle=True)

    def val_dataloader(self) -> object:
        return DataLoader(Noise(20, 2), batch_size=4)

    def test_dataloader(self) -> object:
        return DataLoader(Noise(20, 3), batch_size=4)


class Keyed(Logger):
    """A tracker that writes down the key it has."""

    def __init__(self, variable: str, to: str) -> None:
        self.variable, self.to = variable, to

    def open(self, run: object, rows: object) -> int:
        Path(self.to).write_text(os.environ[self.variable])
        return 0

    def log_rows(self, rows: object) -> None: ...


class Net(TrainingModule):
    """A net that can do harm at a step: fail, or wait once until a test has done harm to it."""

    def __init__(
        self,
        fail_at: int = -1,
        wait_at: int = -1,
        mark: str = "",
        loses_data: bool = False,
        slow_rank: int = -1,
        lingers: str = "",
        dies_at: int = -1,
    ) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.lingers = lingers
        self.slow_rank = slow_rank
        self.loses_data = loses_data
        self.fail_at, self.wait_at, self.mark = fail_at, wait_at, mark
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            if self.loses_data:
                shutil.rmtree(self.mark.replace("mark", "data"))
            raise ValueError("the model is not in the mood")
        if self.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.global_step == self.wait_at and self.global_rank == 0:
            self._wait_once()
        if self.lingers and self.global_step >= 8:
            self._linger()
        if self.global_rank == self.slow_rank:
            time.sleep(0.1)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def _wait_once(self) -> None:
        """Wait for harm, a request to stop (unless `mark`-hold is there) or `mark`-over; say so by `mark`."""
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        over, hold = Path(f"{self.mark}-over"), Path(f"{self.mark}-hold")
        while not over.exists() and (hold.exists() or not self.trainer.requests.stop_requested):
            time.sleep(0.02)

    def _linger(self) -> None:
        """Take two seconds for a step, for as long as a file is there; say which, and by `mark`-process who does."""
        if Path(self.lingers).exists():
            Path(f"{self.mark}-process").write_text(str(os.getpid()))
            Path(self.mark).write_text(str(self.global_step))
            time.sleep(2.0)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)
