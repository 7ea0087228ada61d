"""Arguments of Lightning's Trainer that do here what they do there."""

import re
import runpy
import warnings
from datetime import timedelta
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from support import nets
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from midstride.engine import Trainer
from midstride.engine.checkpointing.determinism import Determinism
from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import JobError, UserCodeError, UserError
from midstride.engine.modules import timers
from midstride.engine.ranks.devices import DeviceRequest, Hardware
from midstride.engine.ranks.placement import resolve_placement

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    from lightning.pytorch import loggers
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(L.LightningModule):
    """Notes the steps that it takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.seen = nn.Linear(2, 1), list[str]()

    def _step(self, name: str, batch: Any) -> Tensor:
        self.seen.append(f"{name} {batch[0].sum():.4f}")
        return self.layer(batch[0]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(*, shuffle: bool = False) -> DataLoader[Any]:
    x = torch.arange(40.0).reshape(20, 2).sin()
    return DataLoader(TensorDataset(x), batch_size=4, shuffle=shuffle)


QUIET = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}


def beside(calls: tuple[str, ...], **options: Any) -> list[Net]:
    """Return two modules after `calls` by Lightning's Trainer and by ours."""
    found = []
    for kind, more in ((L.Trainer, {"accelerator": "cpu", "num_sanity_val_steps": 0}), (Trainer, {})):
        net, trainer = Net(), kind(**QUIET, **options, **more)
        for call in calls:
            if call == "fit":
                trainer.fit(net, loader(shuffle="overfit_batches" in options), loader())
            else:
                getattr(trainer, call)(net, loader())
        found.append(net)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 3, "max_epochs": 9, "val_check_interval": 1, "min_epochs": 4},
        {"overfit_batches": 2, "max_epochs": 3},
        {"overfit_batches": 0.5, "max_epochs": 2, "limit_train_batches": 1},
        {"overfit_batches": 1, "fast_dev_run": 2},
        {"limit_predict_batches": 2, "max_epochs": 1},
        {"limit_predict_batches": 0.5, "max_epochs": 1},
        {"limit_predict_batches": 0, "max_epochs": 1},
    ],
)
def test_an_option_limits_what_it_does_in_lightning(options: dict[str, Any]) -> None:
    theirs, ours = beside(("fit", "validate", "test", "predict"), **options)
    assert ours.seen == theirs.seen
    assert torch.equal(ours.layer.weight, theirs.layer.weight)


def test_a_trial_run_and_a_bare_one_keep_nothing(tmp_path: Path) -> None:
    callbacks = [EarlyStopping("never logged"), ModelCheckpoint(monitor="nor this")]
    for options in ({"fast_dev_run": 2, "callbacks": callbacks}, {"barebones": True, "max_steps": 2}):
        trainer = Trainer(**options, loggers=["tensorboard"])
        trainer.fit(Net(), loader(), loader(), run=tmp_path / "run")  # type: ignore[arg-type]
        assert (trainer.global_step, trainer.settings.loggers) == (2, ())
    assert not (tmp_path / "run").exists()
    assert Trainer(fast_dev_run=2).fast_dev_run == 2  # type: ignore[attr-defined]
    for faulty in (-1, "yes", 1.5):
        with pytest.raises(JobError, match=f"fast_dev_run: should be True or a number of batches, not {faulty!r}"):
            Trainer(fast_dev_run=faulty)  # type: ignore[arg-type]


def test_lightnings_loggers_have_counterparts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board, server, weights = (
        loggers.TensorBoardLogger(tmp_path, name="digits"),
        loggers.MLFlowLogger("digits", tracking_uri=f"sqlite:///{tmp_path}/rows.db"),
        loggers.WandbLogger("mine", project="digits", offline=True, save_dir=tmp_path),
    )
    found = Trainer(logger=[board, loggers.CSVLogger(tmp_path), server, weights], loggers=["tensorboard"])
    assert [(one.path, one.args) for one in found.settings.loggers] == [
        ("tensorboard", {}),
        ("tensorboard", {"log_dir": f"{tmp_path}/digits"}),
        ("mlflow", {"tracking_uri": f"sqlite:///{tmp_path}/rows.db", "experiment": "digits"}),
        ("wandb", {"project": "digits", "dir": str(tmp_path), "mode": "offline"}),
    ]
    assert "CSVLogger is not used" in caplog.text
    assert Trainer(logger=board, fast_dev_run=True).settings.loggers == ()
    assert Trainer(logger=board).arguments["loggers"] == ({"tensorboard": {"log_dir": f"{tmp_path}/digits"}},)
    with pytest.raises(JobError, match="logger: DummyLogger has no counterpart"):
        Trainer(logger=loggers.logger.DummyLogger())


def test_a_strategy_with_unused_parameters_has_lightnings_names() -> None:
    for name in ("true", "false"):
        request = DeviceRequest(strategy=f"ddp_find_unused_parameters_{name}", devices=2, accelerator="cpu")
        placement, faults = resolve_placement(request, Hardware())
        assert (placement.strategy.name, faults) == ("ddp", [])
        assert vars(placement.strategy)["_find_unused"] is (name == "true")


def test_overfitting_reads_in_order_or_says_why_not() -> None:
    net, data = Net(), TensorDataset(torch.arange(8.0).reshape(4, 2))
    weighted = DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0, 0.0, 0.0, 0.0], 4))
    trainer = Trainer(overfit_batches=1, max_epochs=2, limit_val_batches=0)
    trainer.fit(net, weighted)  # type: ignore[arg-type]
    assert net.seen == ["train 6.0000"] * 2
    own = DataLoader(data, batch_sampler=[[0], [1]])
    with pytest.raises(UserError, match="overfit_batches reads the training data in order, and list chooses"):
        Trainer(overfit_batches=1, max_epochs=2).fit(Net(), own)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["00:00:01:30", 90, timedelta(seconds=90), {"minutes": 1, "seconds": 30}])
def test_a_time_has_lightnings_forms(given: Any) -> None:
    assert TrainerOptions.model_validate({"max_time": given}).max_time == 90
    assert Trainer(max_time=given).options.max_epochs is None
    for faulty in ("8h", -1, {"hour": 1}):
        with pytest.raises(JobError, match="max_time"):
            Trainer(max_time=faulty)  # type: ignore[arg-type]


class Slow(nets.Net):
    """Takes ten seconds a step, by a clock of its own."""

    inputs, now = 2, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Slow.now += 10
        return super().training_step(batch, batch_idx)


def test_time_is_counted_over_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: Slow.now))
    run = tmp_path / "run"
    lives = [
        ({"max_time": 100, "max_steps": 3}, 3, "max_steps 3 reached"),
        ({"max_time": "00:00:00:50"}, 5, "max_time 0:00:50 is over"),
        ({"max_time": "00:00:00:50"}, 5, "max_time 0:00:50 is over"),
        ({"max_time": 75}, 8, "max_time 0:01:15 is over"),
        ({"max_time": 75, "min_epochs": 3}, 13, "max_time 0:01:15 is over"),
        ({"max_steps": 15}, 15, "max_steps 15 reached"),
    ]
    for options, steps, why in lives:
        trainer = Trainer(**options, snapshots={"every_steps": 1}, enable_progress_bar=False)
        trainer.fit(Slow(), loader(), run=run)
        Slow.now += 1000  # between the attempts
        assert (trainer.global_step, trainer.progress.why) == (steps, why)


class Broken(Slow):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layer(batch[0]) * 0).sqrt().mean()


def test_an_anomaly_names_its_operation() -> None:
    with pytest.raises(UserCodeError, match=r"RuntimeError: Function '\w+' returned nan"):
        Trainer(max_steps=2, detect_anomaly=True).fit(Broken(), loader())
    assert not torch.is_anomaly_enabled()


def test_cudnn_measures_unless_bits_are_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cudnn.benchmark
    for chosen in (True, False):
        with Determinism(None, on=False, benchmark=chosen):
            assert torch.backends.cudnn.benchmark is chosen
        assert torch.backends.cudnn.benchmark is before
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(UserError, match=r"benchmark=True lets each .* deterministic=False"),
        Determinism(None, on=True, benchmark=True),
    ):
        pass


def test_batch_norm_over_ranks_is_an_option_of_ddp() -> None:
    def faults(strategy: str, devices: int = 2) -> list[str]:
        request = DeviceRequest(strategy=strategy, devices=devices, accelerator="cpu", sync_batchnorm=True)
        return resolve_placement(request, Hardware())[1]

    assert "SyncBatchNorm exists for GPUs only" in faults("ddp_spawn")[0]
    assert faults("sharded") == [
        "sync_batchnorm with strategy sharded: only ddp has it: convert the layers in __init__"
    ]
    assert faults("single", 1) == []


DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_answers_each_argument() -> None:
    assert "<!-- reference: lightning -->" in (DOCS / "lightning.md").read_text()
    text = str(runpy.run_path(str(DOCS / "hooks/reference.py"))["lightning"]())
    taken, free, *rows = [line for line in text.splitlines() if line]
    answered = [row[1] for row in (re.fullmatch(r"\| `(\w+)` \| .+ \| .+ \|", line) for line in rows) if row]
    named = [re.findall(r"`(\w+)`", line) for line in (taken, free)]
    assert set(named[0]) <= {*signature(Trainer).parameters}
    assert sorted([*named[0], *named[1], *answered]) == sorted(signature(L.Trainer).parameters)
