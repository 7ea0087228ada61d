"""Tests of what a rank tells the launcher."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from midstride.engine.session.events import EventTail
from midstride.engine.session.session import Session
from midstride.engine.training import reporter as reporter_module
from midstride.engine.training.reporter import Reporter
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
