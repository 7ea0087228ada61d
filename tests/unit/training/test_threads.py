"""Threads of one process share its random generators: one of them trains at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Loop, Trainer, TrainingModule, seed_everything
from midstride.engine.errors import UserError

DATA: Any = DataLoader(torch.arange(8.0).reshape(4, 2), 2)


class Net(TrainingModule):
    """Calls `meanwhile` in its first step."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.net, self.meanwhile = nn.Linear(2, 1), [meanwhile]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 0:
            self.meanwhile[0]()
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(_run: Path, meanwhile: Callable[[], object]) -> None:
    Trainer(max_epochs=1, enable_progress_bar=False).fit(Net(meanwhile), DATA)


def iterate(run: Path, meanwhile: Callable[[], object]) -> None:
    loop = Loop(run, enable_progress_bar=False)
    model = nn.Linear(2, 1)
    loop.keep(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01))
    data = loop.loader(DATA)
    for _ in loop.epochs(1):
        for _ in data:
            meanwhile()
    loop.close()


TRAININGS = {"Trainer": fit, "Loop": iterate}
OTHERS = {
    **TRAININGS,
    "seeds": lambda _run, _meanwhile: seed_everything(1),
    "test": lambda _run, meanwhile: Trainer().test(Net(meanwhile), DATA),
}


def in_another_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        pool.submit(call).result()


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_second_thread_is_refused_while_one_trains(train: Any, other: Any, tmp_path: Path) -> None:
    refused = []

    def meanwhile() -> None:
        with pytest.raises(UserError, match=r"MainThread of this process trains.* ProcessPoolTaskRunner"):
            in_another_thread(lambda: other(tmp_path / "other", int))
        refused.append(other)

    train(tmp_path / "run", meanwhile)
    assert refused
    in_another_thread(lambda: train(tmp_path / "after", int))


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
def test_a_training_that_has_failed_keeps_no_thread_out(train: Any, tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as failed:
        train(tmp_path / "run", fail)
    assert failed.tb is not None  # an error keeps the frames of the training
    in_another_thread(lambda: train(tmp_path / "run", int))
