"""Callbacks that were written for Lightning's Trainer: what stands for its own, and what those say of a run."""

import csv
import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from midstride.engine import BestCheckpoint, EarlyStopping, Trainer
from midstride.engine.errors import JobError
from midstride.engine.lightning.counterparts import LightningRates

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    from laws.lightning import style
    from lightning.pytorch import callbacks
    from lightning.pytorch.loggers import CSVLogger

pytestmark = pytest.mark.filterwarnings("ignore")


def test_lightnings_own_callbacks_have_counterparts() -> None:
    given = [
        callbacks.EarlyStopping("a", patience=7, mode="max", min_delta=0.5),
        callbacks.ModelCheckpoint(monitor="a", mode="max"),
        callbacks.ModelCheckpoint(every_n_train_steps=3),
        callbacks.LearningRateMonitor(),
        callbacks.TQDMProgressBar(),
    ]
    assert type(Trainer(max_epochs=1, callbacks=given[0]).callbacks[0]) is EarlyStopping
    found = Trainer(max_epochs=1, callbacks=given).callbacks
    assert [type(callback) for callback in found] == [EarlyStopping, BestCheckpoint, LightningRates]
    assert (found[0].monitor, found[0].patience, found[0].mode, found[0].min_delta) == ("a", 7, "max", 0.5)


class Own(callbacks.EarlyStopping):
    pass


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.1),
            "StochasticWeightAveraging needs internals .* use WeightAveraging",
        ),
        (lambda: callbacks.BaseFinetuning(), "use midstride's Unfreeze, or .* in the hooks of a plain Callback"),
        (lambda: callbacks.BasePredictionWriter(), "write in on_predict_batch_end of a plain Callback"),
        (lambda: Own("a"), "Own, derived from Lightning's EarlyStopping, needs internals"),
    ],
)
def test_a_callback_that_needs_lightnings_trainer_is_refused(callback: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        Trainer(max_epochs=1, callbacks=[callback()])


REFUSED = {
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(),
    "BaseFinetuning": lambda: callbacks.BaseFinetuning(),
    "BasePredictionWriter": lambda: callbacks.BasePredictionWriter(),
    "BatchSizeFinder": lambda: callbacks.BatchSizeFinder(),
    "Checkpoint": lambda: callbacks.Checkpoint(),
    "DeviceStatsMonitor": lambda: callbacks.DeviceStatsMonitor(),
    "LearningRateFinder": lambda: callbacks.LearningRateFinder(),
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint("."),
    "SpikeDetection": lambda: callbacks.SpikeDetection(),
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.1),
    "ThroughputMonitor": lambda: callbacks.ThroughputMonitor(batch_size_fn=len),
}
TAKEN = {
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({1: 2}),
    "Timer": lambda: callbacks.Timer(duration="00:01:00:00"),
    "Callback": lambda: L.Callback(),
    "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(),
    "EarlyStopping": lambda: callbacks.EarlyStopping("val_loss"),
    "LambdaCallback": lambda: callbacks.LambdaCallback(),
    "LearningRateMonitor": lambda: callbacks.LearningRateMonitor(),
    "ModelCheckpoint": lambda: callbacks.ModelCheckpoint(),
    "ModelSummary": lambda: callbacks.ModelSummary(),
    "ProgressBar": lambda: callbacks.ProgressBar(),
    "RichModelSummary": lambda: callbacks.RichModelSummary(),
    "RichProgressBar": lambda: callbacks.RichProgressBar(),
    "TQDMProgressBar": lambda: callbacks.TQDMProgressBar(),
    "WeightAveraging": lambda: callbacks.WeightAveraging(),
}


def test_each_lightning_callback_is_taken_or_refused_by_name() -> None:
    assert {*REFUSED, *TAKEN} == set(callbacks.__all__)
    for name, make in REFUSED.items():
        with pytest.raises(JobError, match=f"callbacks: {name} needs internals of Lightning's Trainer: [a-z]"):
            Trainer(max_epochs=1, callbacks=make())
    trainer = Trainer(max_epochs=1, callbacks=[make() for make in TAKEN.values()])
    trainer.fit(style.Classifier(), style.loader(8), style.loader(8))


class Scored(style.Classifier):
    """Logs the scores that it is given, one after each epoch."""

    def __init__(self, scores: Sequence[float]) -> None:
        super().__init__()
        self.scores = scores

    def on_validation_epoch_end(self) -> None:
        self.log("score", self.scores[self.current_epoch])


#: how training is stopped early
STOPPED: list[dict[str, Any]] = [
    {"check_finite": True},
    {"check_finite": False},
    {"stopping_threshold": 1.5},
    {"divergence_threshold": 1.5},
    {"stopping_threshold": 0.5, "divergence_threshold": 2.5, "patience": 9},
    {"monitor": "none", "strict": False},
    {"check_on_train_epoch_end": True},
    {"check_on_train_epoch_end": False},
    {"min_delta": 0.5, "log_rank_zero_only": True},
]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("given", STOPPED, ids=str)
@pytest.mark.parametrize(
    "scores", [(1.0, 2.0, 1.5, 1.5, 1.5), (1.0, math.nan, 3.0, 2.0, 0.0), (1.0, -math.inf, math.inf)]
)
def test_training_stops_early_where_lightning_does(scores: Sequence[float], given: dict[str, Any], mode: str) -> None:
    epochs = []
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = partial(L.Trainer, accelerator="cpu", num_sanity_val_steps=0, **quiet)
    for trainer in (theirs, partial(Trainer, enable_progress_bar=False)):
        stopping = callbacks.EarlyStopping(**{"monitor": "score", "patience": 2, "mode": mode, **given})
        made = trainer(max_epochs=len(scores), callbacks=[stopping])
        made.fit(Scored(scores), style.loader(4), style.loader(4))
        counts = (made.current_epoch, stopping.stopped_epoch, stopping.wait_count, float(stopping.best_score))
        epochs.append((*counts, stopping.stopping_reason, stopping.stopping_reason_message is None))
    assert epochs[1] == epochs[0]


class Logs(L.Callback):
    """Logs by its own methods, which a Trainer of Lightning's gives it."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("each", 1.5, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.log_dict({"of_validation": 2.5})


def test_a_callback_logs_by_its_own_methods() -> None:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    found = []
    for kind in (partial(L.Trainer, accelerator="cpu", num_sanity_val_steps=0, **quiet), Trainer):
        made = kind(max_epochs=1, callbacks=[Logs()])
        torch.manual_seed(0)
        made.fit(style.Classifier(), style.loader(8), style.loader(8))
        found.append({name: float(value) for name, value in made.callback_metrics.items()})
    assert found[1] == found[0]
    assert (found[0]["each"], found[0]["of_validation"]) == (1.5, 2.5)


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            callbacks.ModelCheckpoint(dirpath="kept", monitor="score"),
            ("ModelCheckpoint(dirpath=", "is not used: weights are in the folder of the run"),
        ),
    ],
)
def test_an_option_that_is_not_used_is_named(
    callback: Any, words: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(callbacks=[callback])
    assert all(word in caplog.text for word in words)


class Rates(style.Classifier):
    """Two groups, one of them with a name, and a schedule by steps or epochs."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "name": "first"}, {"params": rest, "lr": 0.5}], 0.1, 0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


def _logged_rates(file: Path, first: int) -> dict[str, dict[int, float]]:
    """Return the values of each column of rates by their step, counted from `first` in the file."""
    found: dict[str, dict[int, float]] = {}
    with file.open() as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if name.startswith("lr") and value:
                    found.setdefault(name, {})[int(row["step"]) - first] = float(value)
    return found


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("asked", [None, "step", "epoch"])
def test_rates_have_lightnings_names(interval: str, asked: Any, tmp_path: Path, caplog: Any) -> None:
    monitors = [callbacks.LearningRateMonitor(asked, log_momentum=True, log_weight_decay=True) for _ in range(2)]
    quiet = {"max_epochs": 2, "enable_progress_bar": False, "log_every_n_steps": 1}
    logger = CSVLogger(tmp_path, name="theirs")
    theirs = L.Trainer(logger=logger, callbacks=[monitors[0]], accelerator="cpu", num_sanity_val_steps=0, **quiet)
    theirs.fit(Rates(interval), style.loader(8), style.loader(8))
    Trainer(callbacks=[monitors[1]], **quiet).fit(
        Rates(interval), style.loader(8), style.loader(8), run=tmp_path / "run"
    )
    expected = _logged_rates(Path(logger.log_dir) / "metrics.csv", 0)
    assert _logged_rates(tmp_path / "run" / "metrics.csv", 1) == expected
    assert {"lr-SGD/first", "lr-SGD/pg2-momentum"} < expected.keys()
    assert [monitors[1].lrs[name] for name in monitors[0].lrs] == [found[-1:] for found in monitors[0].lrs.values()]
    assert not [record for record in caplog.records if "part of no snapshot" in record.message]


def test_callbacks_say_what_those_that_stand_for_them_have_seen(tmp_path: Path) -> None:
    best = callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2)
    stopping, plain = callbacks.EarlyStopping("val_loss", min_delta=9.0, patience=1), callbacks.ModelCheckpoint()
    trainer, run = Trainer(max_epochs=5, callbacks=[best, stopping, plain]), str(tmp_path / "run")
    trainer.fit(module := style.Classifier(), style.loader(8), style.loader(8), run=run)
    assert best.last_model_path == plain.best_model_path == f"{run}/lightning/last.ckpt"
    assert sorted(best.best_k_models) == [
        f"{run}/checkpoints/epoch={epoch}-step={2 + 2 * epoch}.ckpt" for epoch in (0, 1)
    ]
    tested = trainer.validate(module, style.loader(8), ckpt_path=best.best_model_path)
    assert best.best_model_score == torch.tensor(tested["val_loss"])
    assert best.best_k_models[best.best_model_path] == best.best_model_score
    assert (stopping.wait_count, stopping.stopped_epoch, trainer.current_epoch) == (1, 1, 2)
    assert trainer.checkpoint_callbacks == [best, plain]
    assert (trainer.checkpoint_callback, trainer.early_stopping_callback) == (best, stopping)


def test_a_lambda_callback_is_called_and_its_state_kept(tmp_path: Path) -> None:
    def life(epochs: int) -> list[Any]:
        seen: list[Any] = []
        hooks = callbacks.LambdaCallback(
            setup=lambda trainer, module, stage: seen.append((stage, type(module).__name__)),
            on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(("loss" in outputs, index)),
            on_validation_end=lambda trainer, module: seen.append(trainer.global_step),
        )
        options: Any = {"snapshots": {"every_steps": 1}, "accept_change": ["max_epochs"]}
        trainer = Trainer(max_epochs=epochs, callbacks=[hooks], **options)
        trainer.fit(style.Classifier(), style.loader(8), style.loader(8), run=str(tmp_path / "run"))
        return seen

    first, second = life(1), life(2)
    assert first == [("fit", "Classifier"), (True, 0), (True, 1), 2]
    assert second == [*first, (True, 0), (True, 1), 4]


def test_an_uncalled_function_of_a_lambda_callback_is_named() -> None:
    trainer = Trainer(max_epochs=1, callbacks=callbacks.LambdaCallback(on_sanity_check_start=lambda *given: None))
    with pytest.raises(JobError, match=r"LambdaCallback\.on_sanity_check_start would never be called"):
        trainer.fit(style.AutoEncoder(), style.loader(8))


class Weighed(style.Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = checkpoint["global_step"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]


def test_a_saved_checkpoint_is_what_lightnings_class_loads(tmp_path: Path) -> None:
    trainer, module = Trainer(max_epochs=1), Weighed(hidden=5)
    trainer.fit(module, style.loader(8), style.loader(8))
    trainer.save_checkpoint(tmp_path / "new" / "weights.ckpt")
    loaded = Weighed.load_from_checkpoint(tmp_path / "new" / "weights.ckpt", lr=0.5)
    assert (loaded.mine, dict(loaded.hparams)) == (2, {"hidden": 5, "lr": 0.5})
    assert all(map(torch.equal, loaded.state_dict().values(), module.state_dict().values()))


LOADED: list[Any] = []


class Noting(L.Callback):
    """Has its say in checkpoints."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["noted"] = {"step": trainer.global_step, "weights": len(checkpoint["state_dict"])}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        LOADED.append((checkpoint["global_step"], checkpoint["noted"]))


def test_callbacks_have_their_say_in_checkpoints(tmp_path: Path) -> None:
    LOADED.clear()
    options: dict[str, Any] = {"snapshots": {"every_steps": 1}, "accept_change": ["max_epochs"]}
    for epochs in (1, 2):
        trainer = Trainer(max_epochs=epochs, callbacks=Noting(), **options)
        trainer.fit(module := style.AutoEncoder(), style.loader(8), run=tmp_path / "run")
    assert LOADED[-1] == (2, {"step": 2, "weights": len(module.state_dict())})
