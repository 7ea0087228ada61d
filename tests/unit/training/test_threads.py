"""Training in threads: one trains at a time, since they share random generators, and signals stop it."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.flow_runs import wait_for
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Loop, Trainer, TrainingModule, seed_everything
from midstride.engine.errors import StopRequested, UserError
from midstride.engine.processes.signal_listener import stop_signal_since

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


def fit(run: Path, meanwhile: Callable[[], object]) -> None:
    Trainer(max_epochs=1, enable_progress_bar=False).fit(Net(meanwhile), DATA, run=run)


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


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_training_in_another_thread(train: Any, number: signal.Signals, tmp_path: Path) -> None:
    before = signal.signal(number, lambda *_: None)
    try:
        with pytest.raises(StopRequested, match="resumes from snapshot"):
            in_another_thread(lambda: train(tmp_path / "run", lambda: signal_sent(number)))
    finally:
        signal.signal(number, before)
    in_another_thread(lambda: train(tmp_path / "run", int))


def signal_sent(number: signal.Signals) -> None:
    """Send a signal to this process, and wait until it is known."""
    start = time.monotonic()
    os.kill(os.getpid(), number)
    wait_for(lambda: stop_signal_since(start), "the signal")
