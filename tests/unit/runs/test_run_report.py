"""The report of a run that is under way, or ended early: as far as its newest snapshot."""

from pathlib import Path

import pytest
from support.nets import Net
from torch import Tensor, ones
from torch.utils.data import DataLoader

from midstride.engine import Trainer
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import UserError
from midstride.engine.processes.process_identity import process_identity
from midstride.engine.runs.run_report import metric_rows, report_at
from midstride.engine.runs.summary import newest_snapshot, summary_of
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.ending import Ending, EndReason
from midstride.engine.session.outcome import Outcome
from midstride.engine.snapshots.lease import acquire
from midstride.engine.storage.store import Store


class FailsAt(Net):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert batch_idx != self.step, "as it is asked to"
        loss = super().training_step([batch], batch_idx)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([ones(1)] * 6)  # type: ignore[arg-type]  # a list is a data set too


@pytest.mark.parametrize("every_steps", [1, 2])
def test_the_report_of_a_failed_run_counts_up_to_its_snapshot(every_steps: int, tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, snapshots=SnapshotOptions(every_steps=every_steps), enable_progress_bar=False)
    with pytest.raises(UserError, match="as it is asked to"):
        trainer.fit(FailsAt(5), run=str(tmp_path / "run"))
    store = Store.open(tmp_path / "run")
    kept = 5 - 5 % every_steps
    report = report_at(store)
    assert (report.steps, report.epochs) == (kept, 1)
    assert summary_of("run", store).step == kept
    assert len(metric_rows(store)) == kept - 1, "the row of the last step is under way"


def test_an_attempt_without_an_end_is_not_reported_as_ended(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run")
    first, second = AttemptLog(store).begin(), AttemptLog(store).begin()
    report = report_at(store)
    assert report.outcome == "running"
    told = [(failure.attempt, failure.cause) for failure in report.failures]
    assert told == [(first.number, "its launcher was killed, or it still runs")]
    AttemptLog(store).record(first, Outcome("done"), ended=first.started - 3600)
    AttemptLog(store).record(second, Outcome("done"))
    assert report_at(store).failures == ()
    assert report_at(store).seconds >= 0, "the clock was set back while the first trained"


def test_a_run_says_why_it_ended(tmp_path: Path) -> None:
    Trainer(max_epochs=1, enable_progress_bar=False).fit(FailsAt(9), run=str(tmp_path / "run"))
    store = Store.open(tmp_path / "run")
    assert (report_at(store).ended_by, summary_of("run", store).why) == ("max_epochs", "max_epochs 1 reached")
    attempts, why = AttemptLog(store), Ending(EndReason.STOPPED, "stopped by SIGTERM")
    attempts.record(attempts.begin(), Outcome("stopped", "asked to stop"), why)
    assert (report_at(store).ended_by, summary_of("run", store).why) == ("stopped", "stopped by SIGTERM")
    attempts.begin()
    assert (report_at(store).ended_by, summary_of("run", store).why) == ("", "")


@pytest.mark.parametrize("attempts", [0, 1])
def test_a_run_whose_process_has_ended_on_this_machine_is_lost(attempts: int, tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, snapshots=SnapshotOptions(every_steps=2), enable_progress_bar=False)
    with pytest.raises(UserError, match="as it is asked to"):
        trainer.fit(FailsAt(5), run=str(tmp_path / "run"))
    store, ended = Store.open(tmp_path / "run"), {**process_identity(), "pid": 1 << 30}
    assert (summary_of("run", store).state, report_at(store).outcome) == ("running", "running")
    for _ in range(attempts):
        AttemptLog(store).begin()
        assert summary_of("run", store).state == "running", "it is being started: the lease is an earlier attempt's"
    kept = newest_snapshot(store)
    assert kept is not None
    acquire(store, kept.name, ended)
    assert (summary_of("run", store).state, report_at(store).outcome) == ("lost", "lost")


def test_a_script_that_was_started_again_has_attempts_and_restarts(tmp_path: Path) -> None:
    store, trainer = Store.open(tmp_path / "run"), Trainer(max_epochs=1, enable_progress_bar=False)
    with pytest.raises(UserError, match="as it is asked to"):
        trainer.fit(FailsAt(5), run=store.url)
    told = (summary_of("run", store).attempts, report_at(store).restarts)
    assert told == (1, 0)
    for _ in range(2):  # the second has nothing left to train
        Trainer(max_epochs=1, enable_progress_bar=False).fit(FailsAt(9), run=store.url)
        told = (summary_of("run", store).attempts, report_at(store).restarts)
        assert told == (2, 1)
