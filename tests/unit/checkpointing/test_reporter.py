"""Tests of what a rank tells the launcher."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Trainer, TrainingModule
from midstride.engine.checkpointing import reporter as reporter_module
from midstride.engine.checkpointing.reporter import Reporter
from midstride.engine.session.events import EventTail
from midstride.engine.session.session import Session
from midstride.engine.world import World


def test_training_that_waits_hides_no_answer_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training looks every second, the store is asked ever more rarely: each reason has its own limit."""
    now_s = 0.0
    monkeypatch.setattr(reporter_module, "time", SimpleNamespace(monotonic=lambda: now_s, time=time.time))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(Session.VARIABLE, str(tmp_path))
        reporter = Reporter(World(), bar=False)
    for now_s, why in [(5.0, "busy"), (5.9, "busy"), (6.0, "busy"), (6.1, "refused"), (6.9, "busy"), (7.0, "refused")]:
        reporter.store_waits(now_s, why)
    told = [(event.fields["waited_s"], event.fields["why"]) for event in EventTail(Session(tmp_path).events).new()]
    assert told == [(5.0, "busy"), (6.0, "busy"), (6.1, "refused")]


class Logs(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("shown", 0.5, prog_bar=True)
        self.log("both", torch.tensor(2.0), prog_bar=True, on_epoch=True)
        self.log("not shown", 1.0)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_is_reported_with_values_for_the_progress_bar(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(Session.VARIABLE, str(tmp_path))
        Trainer(max_steps=1).fit(Logs(), DataLoader(torch.ones(2, 1)))  # type: ignore[arg-type]
    (step,) = [event for event in EventTail(Session(tmp_path).events).new() if event.kind == "step"]
    assert step.fields["metrics"] == {"shown": 0.5, "both_step": 2.0}
