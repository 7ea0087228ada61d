"""Callbacks for the course of a fit: windows, layers that begin to train, the k best weights, time, errors."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import (
    BestCheckpoint,
    Callback,
    GradientAccumulationScheduler,
    Throughput,
    TrainedWeights,
    Trainer,
    TrainingModule,
    Unfreeze,
)
from midstride.engine.errors import UserCodeError, UserError
from midstride.engine.modules import timers
from midstride.engine.modules.torch_internals import buffers_of
from midstride.engine.runs.audit import audit
from midstride.engine.snapshots.reader import weights_at

#: the epoch in which a life ends, and seconds of a clock; attributes would be part of the snapshot
DIES_IN, CLOCK = [-1], [0.0]
VALUES = [5.0, 3.0, 4.0, 2.0, 6.0, 2.5]


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone, self.head = nn.Linear(2, 3), nn.Linear(3, 1)
        self.caught: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CLOCK[0] += 2
        if (self.current_epoch, batch_idx) == (DIES_IN[0], 1):
            raise LookupError("dies")
        return self.head(self.backbone(batch[0])).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("val/score", VALUES[self.current_epoch])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self.head(self.backbone(batch[0]))
        return found

    def on_exception(self, exception: BaseException) -> None:
        self.caught.append(repr(exception))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)


def fit(
    run: Path | None, *callbacks: Callback, dies_in: int = -1, epochs: int = 6, **options: Any
) -> tuple[Net, Trainer]:
    DIES_IN[0] = dies_in
    net, data = Net(), TensorDataset(torch.arange(16.0).reshape(8, 2) / 16)
    options = {"snapshots": {"every_steps": 1}, "enable_progress_bar": False, **options}
    trainer = Trainer(max_epochs=epochs, callbacks=list(callbacks), **options)
    try:
        trainer.fit(net, DataLoader(data, 2), run=run)
    finally:
        DIES_IN[0] = -1
    return net, trainer


def fit_twice(folder: Path, make: Any, **options: Any) -> list[tuple[Net, Trainer]]:
    """Return an undisturbed fit, and one that failed in epoch 3 and was resumed."""
    undisturbed = fit(folder / "whole", make(), **options)
    with pytest.raises(UserCodeError, match="dies"):
        fit(folder / "torn", make(), dies_in=3, **options)
    return [undisturbed, fit(folder / "torn", make(), **options)]


def assert_alike(one: Net, other: Net) -> None:
    assert not buffers_of(one)
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("mode", "pattern", "names"),
    [
        ("min", None, ["epoch=1-step=8", "epoch=3-step=16", "epoch=5-step=24"]),
        (
            "max",
            "e{epoch:02d}-{val/score:.1f}",
            ["eepoch=00-val_score=5.0-step=4", "eepoch=02-val_score=4.0-step=12", "eepoch=04-val_score=6.0-step=20"],
        ),
    ],
)
def test_the_k_best_weights_have_files(mode: str, pattern: str | None, names: list[str], tmp_path: Path) -> None:
    lives = fit_twice(tmp_path, lambda: BestCheckpoint("val/score", mode, k=3, filename=pattern))
    for life, (_, trainer) in zip(("whole", "torn"), lives, strict=True):
        files = sorted((tmp_path / life / "checkpoints").iterdir())
        assert [file.stem for file in files] == names
        best = trainer.callbacks[0]
        assert isinstance(best, BestCheckpoint)
        assert [row[0] for row in best.kept] == sorted((row[0] for row in best.kept), reverse=mode == "max")
    for name in names:
        whole, torn = (torch.load(tmp_path / life / "checkpoints" / f"{name}.ckpt") for life in ("whole", "torn"))
        assert all(map(torch.equal, whole["state_dict"].values(), torn["state_dict"].values()))
    assert audit(str(tmp_path / "torn")).is_clean


def test_the_k_best_are_refused_where_they_cannot_be_kept() -> None:
    for options, words in (({"k": 0}, "k should be"), ({"filename": "x"}, "set k, or leave it out")):
        with pytest.raises(UserError, match=words):
            BestCheckpoint("val/score", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'none', which was not logged"):
        fit(Path("/dev/shm/never"), BestCheckpoint("val/score", k=2, filename="{none}"), epochs=1, snapshots=None)
    with pytest.raises(UserError, match="memory://x is no folder: leave k out"):
        fit("memory://x", BestCheckpoint("val/score", k=2), epochs=1, snapshots=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("lr", [None, 0.01])
def test_layers_begin_to_train_at_an_epoch(lr: float | None, tmp_path: Path) -> None:
    (whole, trainer), (torn, _) = fit_twice(tmp_path, lambda: Unfreeze("backbone", 2, lr))
    assert_alike(whole, torn)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, lr or 0.1]
    still, _ = fit(None, Unfreeze("backbone", 9))
    assert torch.equal(still.backbone.weight, Net().backbone.weight)
    assert not torch.equal(whole.backbone.weight, Net().backbone.weight)
    with pytest.raises(UserError, match="Net has no such layer"):
        fit(None, Unfreeze(["backbones"], 1))
    with pytest.raises(UserError, match="epoch should be a whole number"):
        Unfreeze("backbone", -1)


def test_windows_change_from_epoch_to_epoch(tmp_path: Path) -> None:
    lives = fit_twice(tmp_path, lambda: GradientAccumulationScheduler({1: 2, 4: 3}))
    assert_alike(lives[0][0], lives[1][0])
    assert [trainer.global_step for _, trainer in lives] == [4 + 3 * 2 + 2 * 2] * 2
    assert lives[0][1].estimated_stepping_batches == 14
    with pytest.raises(UserError, match="both set the accumulation window"):
        fit(None, GradientAccumulationScheduler({1: 2}), accumulate_grad_batches=2)
    for faulty in ({}, {-1: 2}, {0: 0}, {0.5: 1}):
        with pytest.raises(UserError, match="GradientAccumulationScheduler: "):
            GradientAccumulationScheduler(faulty)  # type: ignore[arg-type]


class Adapted(Net):
    """A base that stays, and an adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


def test_best_and_last_hold_the_adapter_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Net", Adapted)
    lives = fit_twice(tmp_path, TrainedWeights)
    for life in ("whole", "torn"):
        found = weights_at(tmp_path / life / "last").state_dict
        assert sorted(found) == ["count", "head.bias", "head.weight"]
        loaded = Adapted.load_from_checkpoint(tmp_path / life / "last")
        assert torch.equal(loaded.head.weight, lives[0][0].head.weight)
    net, trainer = lives[1]
    with torch.no_grad():
        net.head.weight.zero_()
    trainer.predict(net, DataLoader(TensorDataset(torch.ones(2, 2))), ckpt_path="last")
    assert torch.equal(net.head.weight, lives[0][0].head.weight)


class Catching(Callback):
    def __init__(self, *, fails: bool = False) -> None:
        self.caught: list[str] = []
        self.fails = fails

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.caught.append(repr(exception))
        if self.fails:
            raise ValueError("of the hook")


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_learn_of_an_exception(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    catching = Catching(fails=fails)
    with pytest.raises(UserCodeError, match="dies"):
        fit(None, catching, dies_in=0)
    assert catching.caught == ["LookupError('dies')"]
    why = "of the hook\nraised in Catching.on_exception\nIt was called because fit failed with LookupError: dies"
    assert bool(re.search(why, caplog.text)) == fails
    with pytest.raises(RuntimeError, match="mat1"):
        Trainer(callbacks=[catching]).predict(Net(), DataLoader(TensorDataset(torch.ones(2, 3))))
    assert len(catching.caught) == 2


@pytest.mark.parametrize("verb", ["fit", "predict"])
@pytest.mark.parametrize("place", ["setup", "train_dataloader predict_dataloader", "configure_optimizers"])
def test_hooks_learn_of_an_exception_before_the_first_batch(verb: str, place: str) -> None:
    class Failing(Net):
        pass

    def fails(*arguments: Any) -> None:
        raise LookupError("early")

    for name in place.split():
        setattr(Failing, name, fails)
    net, catching = Failing(), Catching()
    trainer = Trainer(max_epochs=1, callbacks=[catching], enable_progress_bar=False)
    data = DataLoader(TensorDataset(torch.ones(2, 2))) if "loader" not in place else None
    is_called = place != "configure_optimizers" or verb == "fit"
    with pytest.raises(UserCodeError, match="early") if is_called else nullcontext():
        getattr(trainer, verb)(net, data)
    assert catching.caught == net.caught == ["LookupError('early')"] * is_called


def test_throughput_is_measured_and_in_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: CLOCK[0]))
    meters = [Throughput(2, tokens=lambda batch: batch[0].numel(), flops=50.0, peak_flops=100.0) for _ in range(2)]
    for meter, run in zip(meters, ("one", "two"), strict=True):
        fit(tmp_path / run, meter, epochs=2)
        assert (meter.samples_per_s, meter.tokens_per_s, meter.utilization) == (1.0, 2.0, 0.5)
        assert meter.state_dict() == {}
    for faulty in ({"every_steps": 0}, {"flops": 1.0}):
        with pytest.raises(UserError, match="Throughput: "):
            Throughput(**faulty)
