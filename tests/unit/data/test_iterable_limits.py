"""Epochs of iterable data sets: their length, their limits, their validations."""

from typing import Any

import pytest
from support.line_streams import Lines
from support.nets import Net
from torch import Tensor
from torch.utils.data import ChainDataset, DataLoader

from midstride.engine import Trainer
from midstride.engine.errors import UserError


class Module(Net):
    """Validates where it is told, and notes where that was."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset, self.validated = dataset, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[:, None].float()], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.trainer.progress.batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, 4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Lines(3), 4)


class Sized(Lines):
    def __len__(self) -> int:
        return self.samples


@pytest.mark.parametrize(
    ("dataset", "interval", "batches"),
    [
        (Lines(), 1.0, [5]),
        (Lines(), 2, [2, 4]),
        (Sized(), 0.5, [2, 4]),
        (ChainDataset([Lines(), Lines()]), 4, [4, 8]),
        (ChainDataset([Sized(), Sized()]), 0.5, [5, 10]),
    ],
)
def test_validation_comes_where_it_is_due(dataset: Any, interval: float, batches: list[int]) -> None:
    module = Module(dataset)
    Trainer(max_epochs=1, val_check_interval=interval, enable_progress_bar=False).fit(module)
    assert module.validated == batches


def test_a_share_of_an_epoch_of_unknown_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"val_check_interval=0\.5 is a share .* Use a number of batches, or 1\.0"):
        Trainer(max_epochs=1, val_check_interval=0.5, enable_progress_bar=False).fit(Module(Lines()))


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_limit_that_leaves_nothing_is_refused(limit: float) -> None:
    with pytest.raises(UserError, match=r"limit_train_batches=0.* leaves none; trainer.validate and trainer.test"):
        Trainer(max_epochs=1, limit_train_batches=limit, enable_progress_bar=False).fit(Module(Lines()))


def test_the_last_batch_closes_a_window_that_is_not_full() -> None:
    trainer = Trainer(max_epochs=2, accumulate_grad_batches=3, enable_progress_bar=False)
    trainer.fit(Module(Lines()))
    assert trainer.progress.step == 2 * 2
