"""Hooks that change the module for a validation: a run that dies within one resumes exactly."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import UserCodeError
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.schedule import SnapshotSchedule
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store
from midstride.engine.testing import final_state

BATCHES = 4
#: the step in whose validation a life ends; an attribute would be part of the snapshot
DIES_AT = [0]


class Averages(Callback):
    """Keeps averaged weights, and puts them in for a validation; `state_dict` lacks the weights to put back."""

    starts, ends = "on_validation_start", "on_validation_end"

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = self.average or {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, p in module.named_parameters():
            self.average[name].lerp_(p.detach(), 0.1)

    def put_in(self, module: Any) -> None:
        self.kept = copy.deepcopy(module.state_dict())
        module.load_state_dict(self.average, strict=False)

    def put_back(self, module: Any) -> None:
        module.load_state_dict(self.kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.average = state_dict["average"]


class WritesPastVersions(Averages):
    """As Lightning's WeightAveraging and torch_ema do."""

    starts, ends = "on_validation_epoch_start", "on_validation_epoch_end"

    def put_in(self, module: Any) -> None:
        self.kept = copy.deepcopy(module.state_dict())
        for name, p in module.named_parameters():
            p.data.copy_(self.average[name])

    def put_back(self, module: Any) -> None:
        for name, p in module.named_parameters():
            p.data.copy_(self.kept[name])


class SwapsMemory(Averages):
    def put_in(self, module: Any) -> None:
        self.kept = {name: p.data for name, p in module.named_parameters()}
        for name, p in module.named_parameters():
            p.data = self.average[name].clone()

    def put_back(self, module: Any) -> None:
        for name, p in module.named_parameters():
            p.data = self.kept[name]


class SwapsLayer(Averages):
    """torch's AveragedModel in place of the layer."""

    def put_in(self, module: Any) -> None:
        self.kept, module.net = module.net, AveragedModel(module.net)
        module.net.module.weight.data.copy_(self.average["net.weight"])

    def put_back(self, module: Any) -> None:
        module.net = self.kept


class AtFirstBatch(WritesPastVersions):
    """Puts the averages in before the first batch, where the bracket of the first hooks is over."""

    starts = "on_validation_batch_start"

    def put_in(self, module: Any) -> None:
        if not hasattr(self, "kept"):
            super().put_in(module)

    def put_back(self, module: Any) -> None:
        super().put_back(module)
        del self.kept


class Moody(Averages):
    """Turns dropout on for a validation, and the modes back from an attribute that no state has."""

    def put_in(self, module: Any) -> None:
        self.kept = {name: layer.training for name, layer in module.named_modules()}
        module.drop.train()

    def put_back(self, module: Any) -> None:
        for name, layer in module.named_modules():
            layer.training = self.kept[name]


class SwitchingSGD(torch.optim.SGD):
    """Weights between steps are others than those that are evaluated, as those of schedule-free optimizers."""

    @torch.no_grad()
    def switch(self, *, evaluates: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(2.0 if evaluates else 0.5).add_(0.0)


class SwitchesOptimizer(Averages):
    starts, ends = "on_validation_epoch_start", "on_validation_end"

    def put_in(self, module: Any) -> None:
        self.kept = {}
        module.optimizers().switch(evaluates=True)

    def put_back(self, module: Any) -> None:
        assert self.kept == {}  # made where the validation began, in this process
        del self.kept
        module.optimizers().switch(evaluates=False)


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(4, 2), nn.Dropout(0.5)
        self.evaluated = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean() * (1.0 + self.evaluated)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == DIES_AT[0] and batch_idx == 2:
            raise LookupError("dies")
        self.evaluated = float(self.drop(self.net(batch[0])).detach().abs().mean())

    def configure_optimizers(self) -> Any:
        return SwitchingSGD(self.parameters(), lr=0.05, momentum=0.9)


def _with_hooks(kind: type[Averages]) -> Callback:
    """Return a callback of `kind` whose hooks of these names put weights in and back."""
    hooks = {
        kind.starts: lambda self, trainer, module, *_: self.put_in(module),
        kind.ends: lambda self, trainer, module, *_: self.put_back(module),
    }
    callback: Callback = type(kind.__name__, (kind,), hooks)()
    return callback


def _life(run: Path, kind: type[Averages], dies_at: int = 0, **options: Any) -> Trainer:
    data = TensorDataset(torch.randn(BATCHES * 4, 4, generator=torch.Generator().manual_seed(0)))
    options = {"max_epochs": 3, "snapshots": {"every_steps": 1}, **options}
    trainer = Trainer(seed=7, callbacks=[_with_hooks(kind)], enable_progress_bar=False, **options)
    DIES_AT[0] = dies_at
    trainer.fit(Net(), DataLoader(data, 4), DataLoader(data, 4), run=run)
    return trainer


SWAPS = (Averages, WritesPastVersions, SwapsMemory, SwapsLayer, AtFirstBatch, Moody, SwitchesOptimizer)


@pytest.mark.parametrize("kind", SWAPS)
def test_a_run_that_dies_on_other_weights_resumes_exactly(kind: type[Averages], tmp_path: Path) -> None:
    _life(tmp_path / "whole", kind)
    with pytest.raises(UserCodeError):
        _life(tmp_path / "broken", kind, dies_at=8)
    newest = SnapshotCatalog(Store.open(str(tmp_path / "broken"))).snapshots()[-1]
    assert newest.position.step == 8
    assert not newest.manifest["facts"]["progress"]["validating"]
    _life(tmp_path / "broken", kind)
    (ours,), (theirs,) = (final_state(str(tmp_path / name)) for name in ("broken", "whole"))
    assert not differences(ours, theirs)


class LogsOnly(Averages):
    """Hooks that leave the module as it is."""

    def put_in(self, module: Any) -> None:
        self.kept = {}

    put_back = put_in


def test_hooks_that_change_nothing_leave_snapshots_within(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError):
        _life(tmp_path, LogsOnly, dies_at=8)
    newest = SnapshotCatalog(Store.open(str(tmp_path))).snapshots()[-1]
    assert newest.manifest["facts"]["progress"]["val_batch"] == 2


def test_a_long_validation_on_other_weights_has_one_before(tmp_path: Path) -> None:
    """The first of them shows that none can be taken within; one before each later one keeps what was trained."""
    with pytest.raises(UserCodeError):
        _life(tmp_path, Averages, dies_at=8, snapshots={"every_steps": 3}, val_check_interval=2)
    steps = [snapshot.position.step for snapshot in SnapshotCatalog(Store.open(str(tmp_path))).snapshots()]
    assert steps[-1] == 8  # not a multiple of 3, and the validation has 4 batches


@pytest.mark.parametrize(
    ("options", "boundaries", "seconds", "falls"),
    [
        ({"every_steps": 4}, 3, 9.0, False),
        ({"every_steps": 4}, 4, 0.0, True),
        ({"every_seconds": 60}, 9, 49.0, False),
        ({"every_seconds": 60}, 1, 50.0, True),
    ],
)
def test_a_schedule_says_what_falls_due_within(
    options: dict[str, Any], boundaries: int, seconds: float, falls: bool
) -> None:
    times = iter((0.0, 10.0))
    schedule = SnapshotSchedule(
        SnapshotOptions.model_validate(options), lambda value: [value], clock=lambda: next(times)
    )
    assert schedule.falls_due_within(boundaries, seconds) is falls
