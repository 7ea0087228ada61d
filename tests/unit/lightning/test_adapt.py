"""Lightning's classes become ours in place: what stays theirs, what is copied and pickled, what is refused by name."""

import copy
import csv
import os
import pickle
import signal
import warnings
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from midstride.engine import Trainer, TrainingModule
from midstride.engine.config.lightning_names import LIGHTNING_OPTIONS
from midstride.engine.errors import JobError, StopRequested, StrategyUnavailable, UserCodeError, UserError
from midstride.engine.lightning.adapt import adapt, is_lightning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    import pytorch_lightning
    from laws.lightning import beside, style
    from lightning.pytorch.strategies import DDPStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


class Older(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = style.Backbone()
        self.tested: list[str] = []

    def test_step(self, batch: Any) -> None:
        self.tested.append(self.trainer.datamodule.name if self.trainer.datamodule else "loader")
        self.log("test/loss", self.inner(batch[0]).sum(), logger=False, rank_zero_only=True)

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged = name


@pytest.mark.parametrize("kind", [style.Classifier, Older])
def test_a_copy_and_a_pickle_are_of_the_class_the_user_wrote(kind: type) -> None:
    module = adapt(kind())
    assert adapt(module) is module
    assert isinstance(module, (TrainingModule, kind))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert (type(other).__name__, type(other).__module__) == (kind.__name__, kind.__module__)
        assert all(map(torch.equal, other.state_dict().values(), module.state_dict().values()))


def test_user_methods_stay_and_nested_modules_are_adapted() -> None:
    module = adapt(Older())
    assert type(module).log is Older.log
    assert isinstance(module.inner, TrainingModule)
    assert type(module).validation_step is TrainingModule.validation_step
    Trainer(max_epochs=1).test(module, style.loader(8))
    assert (module.tested, module.logged) == (["loader"] * 2, "test/loss")


def test_nothing_else_is_touched() -> None:
    for value in (nn.Linear(1, 1), None, 3, object()):
        kind = type(value)
        assert type(adapt(value)) is kind
        assert not is_lightning(kind)


class Ported(style.AutoEncoder):
    def on_validation_model_zero_grad(self) -> None: ...


class Watching(L.Callback):
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None: ...


def test_an_uncalled_hook_is_named_if_the_user_wrote_it() -> None:
    with pytest.raises(JobError) as caught:
        Trainer(max_epochs=1, callbacks=[Watching()]).fit(Ported(), style.loader(8))
    names = [line.split(" would")[0] for line in str(caught.value).splitlines()]
    assert names == ["Ported.on_validation_model_zero_grad", "Watching.on_sanity_check_start"]


def test_a_strategy_of_lightning_is_refused_by_name() -> None:
    with pytest.raises(StrategyUnavailable, match=r"strategy is a DDPStrategy of lightning: .*ddp, .* strategy_args"):
        Trainer(strategy=DDPStrategy())


@pytest.mark.parametrize("name", [name for name in signature(L.Trainer).parameters])
def test_each_trainer_argument_of_lightning_is_answered(name: str) -> None:
    answer = ""
    default = signature(L.Trainer).parameters[name].default
    try:
        Trainer(**{name: default})
    except JobError as error:
        answer = str(error)
    assert not answer or LIGHTNING_OPTIONS.get(name, "should be") in answer
    assert not answer or default or "leave it out" in answer or "left out" in answer


def test_what_asks_for_nothing_in_lightning_asks_for_nothing() -> None:
    options = Trainer(gradient_clip_val=0, accept_change=None).options
    assert options.gradient_clip_val is None
    with pytest.raises(JobError, match="gradient_clip_val: should be more than 0, not -1"):
        Trainer(gradient_clip_val=-1)
    with pytest.raises(JobError, match=r"deterministic: should be true, or false where .*, not 'warn'"):
        Trainer(deterministic="warn")


class Impatient(style.AutoEncoder):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx else None


def test_a_hook_that_would_skip_the_rest_of_an_epoch_is_refused() -> None:
    with pytest.raises(UserError, match=r"on_train_batch_start returned -1 for batch 1.* limit_train"):
        Trainer(max_epochs=1).fit(Impatient(), style.loader(8))


class Reaching(style.AutoEncoder):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_fit_start(self) -> None:
        self.found = attrgetter(self.name)(self.trainer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_epochs", 2),
        ("max_steps", -1),
        ("num_training_batches", 2),
        ("estimated_stepping_batches", 4),
        ("accumulate_grad_batches", 1),
        ("should_stop", False),
        ("sanity_checking", False),
        ("training", True),
        ("world_size", 1),
        ("num_devices", 1),
        ("num_nodes", 1),
        ("node_rank", 0),
        ("log_every_n_steps", 1),
        ("ckpt_path", None),
        ("evaluating", False),
        ("state.fn", "fit"),
        ("state.stage", "train"),
        ("train_dataloader.batch_size", 4),
        ("val_dataloaders", None),
        ("callbacks", ()),
        ("strategy.root_device.type", "cpu"),
        ("datamodule", None),
    ],
)
def test_the_trainer_has_lightnings_names(name: str, value: Any) -> None:
    module = Reaching(name)
    Trainer(max_epochs=2).fit(module, style.loader(8))
    assert module.found == value


class Noting(style.Classifier):
    """Notes what its Trainer says is under way as an evaluation ends."""

    def note(self) -> None:
        trainer = self.trainer
        self.found = (trainer.state.fn, trainer.state.stage, trainer.validating, trainer.testing, trainer.evaluating)

    on_validation_end = on_test_end = note

    def teardown(self, stage: str) -> None:
        self.torn_down_in = self.trainer.state.fn

    test_step = style.Classifier.validation_step


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_the_trainer_tells_its_stage_at_the_end_of_an_evaluation(verb: str) -> None:
    module, trainer = Noting(), Trainer(max_epochs=1)
    getattr(trainer, verb)(module, style.loader(8), *([style.loader(8)] if verb == "fit" else []))
    stage = "test" if verb == "test" else "validate"
    assert module.found == (verb, stage, stage == "validate", stage == "test", True)
    assert module.torn_down_in == verb


class Stopped(style.Acting):
    """Is asked to stop in its second epoch, by which time training has changed what it reads."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_in_an_unrepeatable_epoch_returns_to_its_start(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with pytest.raises(StopRequested, match="after step 9; the run resumes from snapshot 000000000006-g000001"):
        Trainer(max_epochs=2, snapshots={"every_steps": 1}).fit(Stopped(), run=run)


class Tracked(style.AutoEncoder):
    """Speaks to trackers as people do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.logger.experiment.add_scalar("by add_scalar", loss, self.global_step)
        self.logger.experiment.add_scalars("by add_scalars", {"a": 1, "b": 2.0}, self.global_step)
        self.logger.log_metrics({"by log_metrics": loss.detach()}, step=self.global_step)
        self.logger.experiment.log({"by log": 3, "a picture": object()})
        self.loggers[0].experiment.log_metric(self.logger.run_id, "by log_metric", 4)
        return loss

    def on_train_epoch_end(self) -> None:
        self.logger.experiment.add_image("a picture", torch.zeros(3, 4, 4))
        self.logger.experiment.config.setdefaults({"lr": 0.1})
        self.logger.experiment.summary["best"] = 1
        self.logger.experiment["losses"].append(1)

    def on_train_end(self) -> None:
        self.logger.log_metrics({"at the end": 5})

    def on_fit_end(self) -> None:
        self.logger.log_metrics({"after the last row": 6})


def test_numbers_given_to_a_logger_are_logged_others_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(max_epochs=2).fit(Tracked(), style.loader(8), run=str(tmp_path / "run"))
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert len(rows) == 4
    for row in rows:
        assert row["by add_scalar"] == row["by log_metrics"] == row["train_loss"]
        others = ("by add_scalars/a", "by add_scalars/b", "by log", "by log_metric")
        assert [float(row[name]) for name in others] == [1, 2, 3, 4]
    assert [row["at the end"] for row in rows] == ["", "", "", "5.0"]
    named = [record.getMessage().partition(" has no effect")[0] for record in caplog.records]
    pictures = ["self.logger.experiment.log('a picture': object)", "self.logger.experiment.add_image"]
    rest = ["self.logger.experiment.config.setdefaults"]
    rest += ["self.logger.log_metrics('after the last row'), where there is no row to stand in,"]
    items = ["self.logger.experiment.summary['best']", "self.logger.experiment['losses'].append"]
    assert sorted(named) == sorted(pictures + rest + items)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fit_loop", "this run's Trainer has no fit_loop: progress has every count"),
        ("val_check_batch", r"has no val_check_batch: docs/lightning\.md lists"),
        ("test", "has no test: call it on the Trainer, once the fit is over"),
        ("strategy.setup", r"trainer\.strategy\.setup is not supported: use barrier"),
    ],
)
def test_what_the_trainer_has_not_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        Trainer(max_epochs=1).fit(Reaching(name), style.loader(8))


class Holding(L.Callback):
    """Keeps what it is handed, from the start."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer, self.logger, self.module = trainer, trainer.logger, trainer.lightning_module
        self.device = trainer.strategy.root_device
        assert self.module is pl_module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.optimizer, self.strategy = pl_module.optimizers(), trainer.strategy


def test_a_callback_may_keep_the_trainer_from_setup_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(max_epochs=1, callbacks=Holding()).fit(style.AutoEncoder(), style.loader(8), run=tmp_path / "run")
    assert "not part of snapshots" not in caplog.text


class Setting(style.AutoEncoder):
    """Sets an attribute of the Trainer at each step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        setattr(self.trainer, self.name, getattr(self.trainer, self.name, 0) + 1)


def test_trainer_attributes_are_kept_or_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"snapshots": {"every_steps": 1}, "accept_change": ["max_epochs"]}
    for epochs in (1, 2):
        trainer = Trainer(max_epochs=epochs, **options)
        trainer.fit(Setting("phase"), style.loader(8), run=tmp_path / "run")
        assert trainer.phase == 2 * epochs  # type: ignore[attr-defined]
    for name in ("accumulate_grad_batches", "max_epochs", "log_every_n_steps", "current_epoch"):
        match = rf"trainer\.{name} cannot be set here.* (give it to Trainer|step by hand)"
        with pytest.raises(UserCodeError, match=match):
            Trainer(max_epochs=1).fit(Setting(name), style.loader(8))


class Predicting(style.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.calls.append(f"batch {batch_idx}")

    def on_predict_epoch_end(self) -> None:
        self.calls.append("end")


class Scoring(style.Classifier):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("sum", batch[0].double().sum() + dataloader_idx)


@pytest.mark.parametrize("loaders", [1, 2])
def test_results_can_be_read_as_lightnings_list(loaders: int) -> None:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    module, data = Scoring(), [style.loader(8), style.loader(4)][:loaders]
    theirs = L.Trainer(accelerator="cpu", **quiet).test(module, data, verbose=False)
    ours = Trainer().test(module, data)
    assert [ours[at] for at in range(loaders)] == theirs  # type: ignore[index]
    assert ours[-1] == theirs[-1]  # type: ignore[index]
    with pytest.raises(IndexError, match=f"there are values of {loaders} loaders"):
        ours[loaders]  # type: ignore[index]
    with pytest.raises(KeyError, match="other"):
        ours["other"]


def test_predictions_are_those_of_lightning() -> None:
    module, data = Predicting(), beside.Parts()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = L.Trainer(accelerator="cpu", **quiet).predict(module, data)
    assert theirs is not None
    ours = Trainer(max_epochs=1).predict(module, data)
    assert all(map(torch.equal, ours, theirs))
    assert module.calls == ["batch 0", "batch 1", "end"] * 2


def test_predictions_of_several_loaders_are_one_list_each() -> None:
    class Numbered(Predicting):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:  # type: ignore[override]
            return self(batch[0]) + dataloader_idx

    module, loaders = Numbered(), [style.loader(8), style.loader(4)]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = L.Trainer(accelerator="cpu", **quiet).predict(module, loaders)
    assert theirs is not None
    ours = Trainer(max_epochs=1).predict(module, loaders)
    assert [len(loader) for loader in ours] == [len(loader) for loader in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one, other))
