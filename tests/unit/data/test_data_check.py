"""Map-style data that are others than in an earlier attempt, or on another rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import NotExact
from midstride.engine.testing import run_ranks


class Rows(Dataset[Tensor]):
    """Rows of a draw, scaled by what training sets."""

    def __init__(self, seed: int) -> None:
        self.rows = torch.randn(24, 2, generator=torch.Generator().manual_seed(seed))
        self.scale = 1.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] * self.scale + torch.rand(2)


class Net(TrainingModule):
    def __init__(self, grades: bool) -> None:
        super().__init__()
        self.layer, self.grades = nn.Linear(2, 1), grades

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.grades:
            self.trainer.train_dataloader.dataset.scale *= 1.1
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    run: Path, seed: int, steps: int, *, workers: int = 0, grades: bool = False, kind: Any = Rows, **options: Any
) -> Any:
    """Train up to a step on rows of a seed."""
    rows = kind(seed)
    trainer = Trainer(max_epochs=9, max_steps=steps, snapshots={"every_steps": 2}, enable_progress_bar=False, **options)
    trainer.fit(Net(grades), DataLoader(rows, 4, shuffle=True, num_workers=workers), run=run)
    return rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [4, 6])
def test_other_data_than_when_the_run_began_are_refused(workers: int, steps: int, tmp_path: Path) -> None:
    fit(tmp_path, 1, steps, workers=workers)
    with pytest.raises(NotExact, match="other samples at the same indices than when the run began"):
        fit(tmp_path, 2, 12, workers=workers)
    fit(tmp_path, 1, 8, workers=2 - workers)
    fit(tmp_path, 2, 10, accept_change="samples")
    fit(tmp_path, 3, 12)


def test_data_that_training_changes_are_not_compared(tmp_path: Path) -> None:
    fit(tmp_path, 1, 4, grades=True)
    fit(tmp_path, 1, 8, grades=True)


class Counting(Rows):
    """Counts its reads."""

    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return super().__getitem__(index)


def test_samples_that_are_compared_are_not_counted_as_read(tmp_path: Path) -> None:
    assert fit(tmp_path, 1, 4, kind=Counting).reads == 16


def _on_ranks(run: str, seeds: tuple[int, ...]) -> None:
    seed = seeds[int(os.environ["RANK"])]
    if len({*seeds}) == 1:
        fit(Path(run), seed, 3, strategy="ddp")
        return
    with pytest.raises(NotExact, match="different samples at the same indices on different ranks"):
        fit(Path(run), seed, 3, strategy="ddp")


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_data_that_differ_between_ranks_are_refused(seeds: tuple[int, ...], tmp_path: Path) -> None:
    assert run_ranks(_on_ranks, str(tmp_path), seeds, processes=2) == [0, 0]
