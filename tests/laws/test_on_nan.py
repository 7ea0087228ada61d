"""`on_nan: skip`: a batch with a bad loss on one rank moves nothing on any rank, and resuming is as exact as ever."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.lives import SampleData, Setting, assert_alike, live
from laws.modules import Metered
from torch import Tensor

from midstride.engine import Callback, Trainer
from midstride.engine.errors import LossNotFinite, UserCodeError, UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.runs.audit import audit
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.weights import facts_of
from midstride.engine.state.differences import differences
from midstride.engine.state.stateful import state_of
from midstride.engine.storage.store import Store

#: in the first epoch, of the last rank: in the middle of windows and, of 4, the one that closes the first
BAD = {1, 3}


class Poisoned(Metered):
    """Some batches are not finite, and all that touches them: batch norm, metrics, logged values, what is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.progress.epoch == 0 and batch_idx in BAD and self.global_rank == self.trainer.world.size - 1:
            batch = [batch[0] * float("nan"), *batch[1:]]
        loss = super().training_step(batch, batch_idx)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss


def left_out(folder: Path) -> list[list[int]]:
    return SnapshotCatalog(Store.open(str(folder / "run"))).snapshots()[-1].manifest["facts"]["left_out"]


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, "every step"), (1, "accumulation"), (3, "plain"), (3, "accumulation")]
)
def test_bad_batches_are_left_out_alike_in_every_life(
    ranks: int, layout: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=ranks, layout=layout, module=Poisoned, options={"on_nan": "skip"})
    plan = FaultPlan(tmp_path / "plan")
    plan.add("kill", rank=ranks - 1, step=1, phase="validation").add("kill", step=3, phase="backward")
    for _ in plan.faults:
        assert -9 in live(setting, tmp_path, plan)
    assert live(setting, tmp_path, plan) == [0] * ranks
    plan.assert_all_fired()
    assert_alike(tmp_path, undisturbed(setting))
    assert left_out(tmp_path) == [[0, batch] for batch in sorted(BAD)]
    found = audit(str(tmp_path / "run"))
    assert found.is_clean
    assert found.epochs[0].left_out == tuple(sorted(BAD))
    weights = facts_of(Store.open(tmp_path / "run"), "last")["metrics"]
    assert all(value == value for value in weights.values()), "no logged value was touched by a bad batch"


class Unmoved(Callback):
    """Compares what there is before and after a bad batch."""

    def __init__(self) -> None:
        self.before: Any = None
        self.compared: list[int] = []

    def _state(self, trainer: Trainer) -> Any:
        assert trainer.last_fit is not None
        assert trainer.last_fit.checkpointer is not None
        state = state_of(trainer.last_fit.checkpointer.parts)
        return copy.deepcopy({name: state[name] for name in ("module", "optimizers", "metrics", "logged", "gradients")})

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.before = self._state(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.epoch == 0 and batch_idx in BAD:
            assert not differences(self.before, self._state(trainer))
            self.compared.append(batch_idx)


@pytest.mark.filterwarnings("ignore:Encountered `nan` values:UserWarning")
def test_a_bad_batch_moves_nothing(tmp_path: Path) -> None:
    unmoved = Unmoved()
    trainer = Trainer(callbacks=[unmoved], max_epochs=1, on_nan="skip", enable_progress_bar=False)
    trainer.fit(Poisoned(), SampleData(1, 0), run=str(tmp_path / "run"))
    assert unmoved.compared == sorted(BAD)
    assert trainer.progress.step == 6 - len(BAD)


class Hopeless(Metered):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * torch.inf


def test_weights_that_are_bad_themselves_end_the_run(tmp_path: Path) -> None:
    trainer = Trainer(max_steps=1, on_nan="skip", enable_progress_bar=False)
    with pytest.raises(LossNotFinite, match="100 batches in a row"):
        trainer.fit(Hopeless(), SampleData(1, 0), run=str(tmp_path / "run"))


class Ruined(Metered):
    """Bad from the second epoch on; dies in one."""

    dies_in: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        epoch = self.trainer.progress.epoch
        if epoch == type(self).dies_in:
            raise InterruptedError
        return super().training_step(batch, batch_idx) * (torch.inf if epoch else 1.0)


@pytest.mark.filterwarnings("ignore:Encountered `nan` values:UserWarning")
def test_batches_left_out_in_a_row_are_counted_over_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(name: str, *dies_in: int | None) -> list[str]:
        messages = []
        for epoch in dies_in:
            monkeypatch.setattr(Ruined, "dies_in", epoch)
            trainer = Trainer(max_epochs=40, on_nan="skip", snapshots={"every_steps": 1}, enable_progress_bar=False)
            with pytest.raises((LossNotFinite, UserCodeError)) as ended:
                trainer.fit(Ruined(), SampleData(1, 0), run=str(tmp_path / name))
            messages.append(str(ended.value))
        return messages

    (undisturbed,), (*deaths, end) = ends("undisturbed", None), ends("disturbed", 4, 5, 9, None)
    assert all("InterruptedError" in death for death in deaths)
    assert "100 batches in a row, up to batch 4 of epoch 17" in undisturbed
    assert end == undisturbed


class Rough(Metered):
    """Every other batch is bad."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx % 2 else 1.0)


@pytest.mark.filterwarnings("ignore:Encountered `nan` values:UserWarning")
def test_bad_batches_far_apart_do_not_end_a_run() -> None:
    trainer = Trainer(max_epochs=35, on_nan="skip", enable_progress_bar=False)
    trainer.fit(Rough(), SampleData(1, 0))
    assert trainer.progress.step == 35 * 3


class ByHand(Metered):
    automatic_optimization = False


def test_what_cannot_be_taken_back_is_refused() -> None:
    trainer = Trainer(max_steps=1, on_nan="skip", enable_progress_bar=False)
    with pytest.raises(UserError, match="on_nan: skip needs one optimizer"):
        trainer.fit(ByHand(), SampleData(1, 0))
