"""Averaged weights: those of plain PyTorch and of Lightning, also over a death, and saved as best and last."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import BestCheckpoint, Trainer, WeightAveraging
from midstride.engine.errors import UserCodeError

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, of workers and of steps between logs

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
EPOCHS, BATCH = 3, 4
DIES_AT = [0]


class AtEpochs(callbacks.WeightAveraging):
    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return epoch_idx is not None and epoch_idx >= 1


#: ours, Lightning's, and arguments and times of plain PyTorch's
CASES: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "mean": (WeightAveraging, callbacks.WeightAveraging, {"use_buffers": True}, lambda step, epoch: step is not None),
    "ema": (
        lambda: WeightAveraging(0.8, every_steps=2, start_step=3, use_buffers=False),
        lambda: callbacks.EMAWeightAveraging(
            decay=0.8, update_every_n_steps=2, update_starting_at_step=3, use_buffers=False
        ),
        {"avg_fn": get_ema_avg_fn(0.8)},
        lambda step, epoch: step is not None and step >= 3 and step % 2 == 0,
    ),
    "epochs": (None, AtEpochs, {"use_buffers": True}, lambda step, epoch: epoch is not None and epoch >= 1),
}


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == DIES_AT[0] and batch_idx == 1:
            raise LookupError("dies")
        self.log("loss", mse_loss(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def _plain(arguments: dict[str, Any], is_due: Any) -> dict[str, Tensor]:
    module = Net()
    average, optimizer = AveragedModel(module, **arguments), module.configure_optimizers()
    step = 0
    for epoch in range(EPOCHS):
        module.train()
        for batch in DataLoader(DATA, BATCH):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
            if is_due(step, None):
                average.update_parameters(module)
            step += 1
        if is_due(None, epoch):
            average.update_parameters(module)
    return average.module.state_dict()


def _fit(callback: Any, run: Path, dies_at: int = 0) -> tuple[Trainer, Net]:
    DIES_AT[0], module = dies_at, Net()
    trainer = Trainer(
        max_epochs=EPOCHS,
        callbacks=[callback, BestCheckpoint("loss")],
        snapshots={"every_steps": 1},
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(DATA, BATCH), DataLoader(DATA, BATCH), run=run)
    return trainer, module


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", CASES)
def test_averages_are_those_of_plain_pytorch_over_a_death(case: str, tmp_path: Path) -> None:
    ours, theirs, arguments, is_due = CASES[case]
    expected = _plain(arguments, is_due)
    for number, make in enumerate(filter(None, (ours, theirs))):
        run = tmp_path / str(number)
        with pytest.raises(UserCodeError):  # in the second validation
            _fit(make(), run, dies_at=8)
        trainer, module = _fit(make(), run)
        assert _same(module.state_dict(), expected)
        by_test = {name: trainer.test(Net(), DataLoader(DATA, BATCH), ckpt_path=name) for name in ("best", "last")}
        best = trainer.callbacks[1]
        assert isinstance(best, BestCheckpoint)
        if case != "epochs":  # there the average is updated after the validation, before best is saved
            assert by_test["best"]["loss"] == best.best
        assert by_test["last"]["loss"] == trainer.test(module, DataLoader(DATA, BATCH))["loss"]


def test_averages_end_where_lightning_ends_them(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
    theirs = Net()
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=callbacks.WeightAveraging(), **quiet)  # type: ignore[arg-type]
    trainer.fit(theirs, DataLoader(DATA, BATCH), DataLoader(DATA, BATCH))
    _, ours = _fit(callbacks.WeightAveraging(), tmp_path)
    assert _same(ours.state_dict(), theirs.state_dict())
