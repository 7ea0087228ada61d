"""Tests of what a rank tells the launcher."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.nets import Net
from torch import Tensor
from torch.utils.data import DataLoader

from midstride.engine import Trainer
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


def test_a_resume_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A launcher shows the event; without one, a line is logged."""
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setenv(Session.VARIABLE, str(tmp_path))
        Reporter(World(), bar=False).resumed(2, "000000000004-g000001", 4)
        assert caplog.records == []
        assert [event.kind for event in EventTail(Session(tmp_path).events).new()] == ["resumed"]
        patch.delenv(Session.VARIABLE)
        Reporter(World(), bar=False).resumed(2, "000000000004-g000001", 4)
        assert [record.message for record in caplog.records] == [
            "generation 2 resumes from snapshot 000000000004-g000001, step 4"
        ]


class Logs(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("shown", 0.5, prog_bar=True)
        self.log("both", torch.tensor(2.0), prog_bar=True, on_epoch=True)
        self.log("not shown", 1.0)
        return super().training_step([batch], batch_idx)


def test_a_step_is_reported_with_values_for_the_progress_bar(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(Session.VARIABLE, str(tmp_path))
        Trainer(max_steps=1).fit(Logs(), DataLoader(torch.ones(2, 1)))  # type: ignore[arg-type]
    (step,) = [event for event in EventTail(Session(tmp_path).events).new() if event.kind == "step"]
    assert step.fields["metrics"] == {"shown": 0.5, "both_step": 2.0}
