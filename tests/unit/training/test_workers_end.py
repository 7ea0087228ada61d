"""Workers of loaders end with what they read for, while module and Trainer are still there."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.nets import Net
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from midstride.engine import Trainer
from midstride.engine.errors import UserCodeError


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(8, 1))


class Line(Net):
    def __init__(self, loader: Callable[[], Any], raises_at: int | None = None) -> None:
        super().__init__()
        self.loader, self.raises_at = loader, raises_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.raises_at:
            raise ValueError("stop")
        return sum(self.layer(x).square().mean() for x in (batch if isinstance(batch, list) else [batch]))  # type: ignore[return-value]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Read it."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch

    def train_dataloader(self) -> Any:
        return self.loader()

    val_dataloader = predict_dataloader = train_dataloader


def read(dataset: Any, *, stay: bool) -> DataLoader[Any]:
    return DataLoader(dataset, 2, num_workers=1, persistent_workers=stay)


LOADERS: dict[str, Callable[[], Any]] = {
    "that stay": lambda: read(torch.ones(8, 1), stay=True),
    "for an epoch": lambda: read(torch.ones(8, 1), stay=False),
    "that stay, of a stream": lambda: read(Stream(), stay=True),
    "of two loaders": lambda: [read(torch.ones(8, 1), stay=True), read(Stream(), stay=True)],
}
ENDS: dict[str, tuple[int | None, int]] = {"at its end": (None, 99), "in an epoch": (None, 2), "with an error": (2, 99)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", LOADERS)
def test_no_worker_outlives_a_fit(name: str, end: str) -> None:
    raises_at, steps = ENDS[end]
    trainer = Trainer(max_epochs=2, max_steps=steps, enable_progress_bar=False)
    module = Line(LOADERS[name], raises_at)
    with contextlib.nullcontext() if raises_at is None else pytest.raises(UserCodeError):
        trainer.fit(module)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("verb", ["validate", "predict"])
@pytest.mark.parametrize("name", LOADERS)
def test_no_worker_outlives_an_evaluation(name: str, verb: str) -> None:
    trainer = Trainer(enable_progress_bar=False)
    getattr(trainer, verb)(Line(LOADERS[name]))
    assert multiprocessing.active_children() == []
