"""The Trainer as a user meets it: fit, validate, test, predict, in any order."""

import inspect
import os
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import BestCheckpoint, DataModule, EarlyStopping, LearningRateMonitor, Trainer, TrainingModule
from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import UserError
from midstride.engine.session.events import EventLog
from midstride.engine.session.session import Session
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store
from midstride.engine.testing import assert_resumes_exactly


def test_a_trainer_shows_its_options_and_their_defaults() -> None:
    shown = inspect.signature(Trainer).parameters
    assert {name: shown[name].default for name in TrainerOptions.model_fields} == TrainerOptions().model_dump()
    documented = set(re.findall(r"^ {4}(\w+):", inspect.getdoc(Trainer) or "", re.MULTILINE))
    assert documented - {"JobError"} == set(shown)


@pytest.mark.parametrize("name", ["use_distributed_sampler", "replace_sampler_ddp"])
def test_an_older_name_of_an_option_is_taken(name: str) -> None:
    assert Trainer(**{name: False}).options.use_distributed_sampler is False


class Line(TrainingModule):
    """Learns y = 2x."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)
        self.rate = rate
        self._calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def on_fit_start(self) -> None:
        self._calls.append("fit")

    def on_train_epoch_start(self) -> None:
        self._calls.append("epoch")

    def on_validation_start(self) -> None:
        self._calls.append("validation")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._calls.append("step")

    def on_train_epoch_end(self) -> None:
        self._calls.append("end")


class Points(DataModule):
    def setup(self, stage: str) -> None:
        x = torch.arange(8.0)[:, None] / 8
        self.points = TensorDataset(x, 2 * x)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, 4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, 3)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("run", [None, "run"])
def test_few_frames_lie_between_fit_and_the_step(automatic: bool, run: str | None, tmp_path: Path) -> None:
    """A newcomer who follows a batch, or reads a stack, passes few functions in few files."""

    class Raises(Line):
        automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise LookupError([frame for frame in traceback.extract_stack() if "engine" in Path(frame.filename).parts])

    with pytest.raises(LookupError) as raised:
        Trainer(max_epochs=1).fit(Raises(), Points(), run=None if run is None else tmp_path / run)
    (frames,) = raised.value.__cause__.args if raised.value.__cause__ else raised.value.args
    assert frames[1].name == "fit"
    assert len(frames) <= 10, frames
    assert len({frame.filename for frame in frames}) <= 6, frames


def test_hooks_come_in_order() -> None:
    module = Line()
    Trainer(max_epochs=2, val_check_interval=0.5).fit(module, Points())
    epoch = ["epoch", "step", "validation", "step", "validation", "end"]
    assert module._calls == ["fit", *epoch, *epoch]


@pytest.mark.parametrize(("loaders", "told"), [(1, [7] * 3), (2, [[0] * 3, [1] * 3])])
def test_a_prediction_is_told_its_loader_where_there_are_several(loaders: int, told: list[int]) -> None:
    class Told(Line):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 7) -> Any:
            return dataloader_idx

    data = Points()
    data.setup("predict")
    assert Trainer().predict(Told(), [data.predict_dataloader()] * loaders) == told


def test_only_every_nth_epoch_has_validations() -> None:
    module = Line()
    Trainer(max_epochs=5, check_val_every_n_epoch=2).fit(module, Points())
    without, with_one = ["epoch", "step", "step", "end"], ["epoch", "step", "step", "validation", "end"]
    assert module._calls == ["fit", *without, *with_one, *without, *with_one, *without]


@pytest.mark.parametrize(("least", "epochs"), [(None, 3), (2, 3), (7, 7)])
def test_early_stopping_waits_for_the_least_number_of_epochs(least: int | None, epochs: int) -> None:
    trainer = Trainer(max_epochs=9, min_epochs=least, callbacks=[EarlyStopping("val/loss", patience=2)])
    trainer.fit(Line(rate=0.0), Points())
    assert trainer.progress.epoch == epochs


def test_fit_then_test_then_predict_with_the_best_weights(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    trainer = Trainer(max_epochs=20, callbacks=[BestCheckpoint("val/loss"), LearningRateMonitor()])
    module = Line()
    trainer.fit(module, Points(), run=run)
    last = trainer.test(module, Points(), ckpt_path="last")
    assert last == trainer.test(module, Points())
    assert trainer.validate(module, Points())["val/loss"] == last["test/loss"] < 0.1
    best = Line.load_from_checkpoint(f"{run}/best")
    assert best.rate == 0.1
    predictions = torch.cat(Trainer().predict(best, Points()))
    assert predictions.shape == (8, 1)
    assert mse_loss(predictions, torch.arange(8.0)[:, None] / 4) < 0.1


@pytest.mark.parametrize("by", ["argument", "position", "module"])
def test_loaders_are_given_or_the_modules_own(by: str, tmp_path: Path) -> None:
    class WithLoader(Line):
        def val_dataloader(self) -> DataLoader[Any]:
            return validation

    points = Points()
    points.setup("fit")
    training, validation = points.train_dataloader(), points.val_dataloader()
    given = {"argument": {"val_dataloaders": validation}, "position": {}, "module": {}}[by]
    trainer = Trainer(max_epochs=2)  # before the module: it seeds
    module = WithLoader() if by == "module" else Line()
    trainer.fit(module, training, *([[validation]] if by == "position" else []), run=str(tmp_path / "run"), **given)
    assert module._calls.count("validation") == 2
    again = Trainer(max_epochs=2)
    whole = Line()
    again.fit(whole, Points())
    assert torch.equal(module.layer.weight, whole.layer.weight)
    assert trainer.test(module, validation) == trainer.test(module, [validation]) == trainer.test(module, Points())
    assert torch.equal(torch.cat(trainer.predict(module, validation)), torch.cat(trainer.predict(module, Points())))


def test_a_module_prepares_and_sets_up_as_its_data_do() -> None:
    class Whole(Line):
        def prepare_data(self) -> None:
            self._calls.append("prepare")

        def setup(self, stage: str) -> None:
            self._calls.append(f"setup {stage}")
            self.points = Points()
            self.points.setup(stage)
            if stage == "fit":
                self.layer = nn.Linear(1, 1)

        def teardown(self, stage: str) -> None:
            self._calls.append(f"teardown {stage}")

        def train_dataloader(self) -> DataLoader[Any]:
            return self.points.train_dataloader()

        def test_dataloader(self) -> DataLoader[Any]:
            return self.points.val_dataloader()

    trainer, module = Trainer(max_epochs=1), Whole()
    trainer.fit(module)
    trainer.test(module)
    assert module._calls[:3] == ["prepare", "setup fit", "fit"]
    assert module._calls[-5:] == ["end", "teardown fit", "prepare", "setup test", "teardown test"]


def test_what_is_no_loader_is_refused() -> None:
    points = Points()
    points.setup("fit")
    with pytest.raises(UserError, match="val_dataloaders is a TensorDataset; a DataLoader"):
        Trainer(max_epochs=1).fit(Line(), points.train_dataloader(), points.points)
    with pytest.raises(TypeError, match="too many positional arguments"):
        Trainer(max_epochs=1).fit(Line(), Points(), None, "runs/first")  # type: ignore[misc]


def test_one_fit_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=3, callbacks=[BestCheckpoint("val/loss"), EarlyStopping("val/loss", patience=1)])
    trainer.fit(Line(), Points(), run=str(tmp_path / "a"))
    steps = trainer.progress.step
    trainer.validate(Line(rate=1.0), Points())
    trainer.fit(Line(), Points(), run=str(tmp_path / "b"))
    assert trainer.progress.step == steps
    assert (tmp_path / "b" / "metrics.csv").exists()
    assert trainer.test(Line(), Points(), ckpt_path="best")


def test_an_interval_that_is_never_due_is_refused() -> None:
    with pytest.raises(UserError, match=r"=3 batches is more than the 2 .*check_val_every_n_epoch=None"):
        Trainer(max_epochs=1, val_check_interval=3).fit(Line(), Points())


def test_early_stopping_stops_and_is_finished(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=50, callbacks=[EarlyStopping("val/loss", patience=2)])
    trainer.fit(Line(rate=0.0), Points(), run=str(tmp_path / "run"))
    assert trainer.progress.epoch == 2 or trainer.progress.step == 6
    assert trainer.progress.finished


def test_resume_never_starts_over_and_resume_at_a_step_goes_back(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    taken: list[int] = []  # in this life; what a module holds comes back

    class Noted(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            taken.append(batch_idx)
            return super().training_step(batch, batch_idx)

    for resume, steps in (("auto", 4), ("never", 4), (2, 2), ("auto", 0)):
        taken.clear()
        module = Noted()
        Trainer(max_epochs=2, snapshots={"every_steps": 1, "keep": 9}).fit(module, Points(), run=run, resume=resume)  # type: ignore[arg-type]
        assert len(taken) == steps
        assert module._calls.count("step") == 4


def test_users_can_check_their_own_module() -> None:
    assert_resumes_exactly(Line, Points, steps=4)

    class Secretive(Line):
        """Keeps on its class what decides its loss."""

        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            Secretive.seen += 1
            return super().training_step(batch, batch_idx) * (1 + self.seen % 3)

    with pytest.raises(AssertionError, match=r"resumed after step 1.*\n.*layer\.weight"):
        assert_resumes_exactly(Secretive, Points, steps=4)


def test_a_script_needs_no_orchestrator(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_trainer import *\n"
        "trainer = Trainer(max_epochs=1)\n"
        f"trainer.fit(Line(), Points(), run={str(tmp_path / 'run')!r})\n"
        "assert not {'prefect', 'fastapi', 'torchmetrics'} & set(sys.modules), 'too much was imported'\n"
    )
    subprocess.run([sys.executable, str(script)], check=True)
    assert list((tmp_path / "run" / "last").glob("*/manifest.json"))


def test_a_group_of_unknown_parameters_is_refused(tmp_path: Path) -> None:
    class Borrowing(Line):
        def on_train_epoch_start(self) -> None:
            self.optimizers().add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    with pytest.raises(UserError, match=r"optimizer 0 \(SGD\) .* of shape \(3,\) is not the module's"):
        Trainer(max_epochs=1, snapshots={"every_steps": 1}).fit(Borrowing(), Points(), run=str(tmp_path / "run"))


def test_a_snapshot_requested_at_the_start_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(log: EventLog, kind: str, **fields: object) -> None:
        told.append(kind)
        if kind == "started" and told.count(kind) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    told = list[str]()
    (tmp_path / "session").mkdir()
    monkeypatch.setattr(EventLog, "emit", emit)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as a rank that has not begun to train
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(Session.VARIABLE, str(tmp_path / "session"))
            Trainer(max_steps=3, snapshots={"every_steps": 1000}).fit(Line(), Points(), run=tmp_path / "run")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "started" in told
    assert [one.position.step for one in SnapshotCatalog(Store.open(tmp_path / "run")).snapshots()] == [1, 3]
