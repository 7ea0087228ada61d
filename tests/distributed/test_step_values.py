"""What steps log on several ranks: where the ranks meet, all of them find the same values, and may monitor them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import BestCheckpoint, EarlyStopping, Trainer, TrainingModule
from midstride.engine.testing import run_ranks

RANKS, EPOCHS = 3, 3
#: name -> its value on each rank, of a step in epoch 0; each epoch adds 10. `both` has a value of the epoch, too
OF_RANKS = {"own": [1.0, 2.0, 6.0], "together": [1.0, 2.0, 6.0], "both": [1.0, 2.0, 6.0], "second": [None, 2.0, None]}
#: without sync_dist the first rank that has a value speaks for all
ALIKE = {"own": 1.0, "together": 3.0, "both": 3.0, "both_step": 3.0, "second": 2.0}


class Steps(TrainingModule):
    """Logs for each step what `OF_RANKS` says, and notes what is known as epochs end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.noted: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name, of_ranks in OF_RANKS.items():
            if (value := of_ranks[self.global_rank]) is not None:
                both = name == "both"
                self.log(name, value + 10 * self.current_epoch, on_epoch=both, on_step=True, sync_dist=name != "own")
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.noted.append({name: float(self.trainer.callback_metrics[name]) for name in ALIKE})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": plateau, "monitor": "own"}]


def train(folder: str, validated: bool, monitor: str) -> None:
    data = DataLoader(TensorDataset(torch.arange(12.0)[:, None]), 2)
    watching: list[Any] = [BestCheckpoint(monitor, "max"), EarlyStopping(monitor, patience=1)]
    # snapshots put shares of values together before the ranks meet at the end of an epoch
    trainer = Trainer(strategy="ddp", max_epochs=EPOCHS, callbacks=watching, snapshots={"every_steps": 1})
    module = Steps()
    trainer.fit(module, data, data if validated else None, run=str(Path(folder, "run")))
    found = {
        "best": watching[0].best,
        "epochs": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "noted": module.noted,
    }
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("monitor", ["own", "together", "both_step", "second"])
def test_what_a_step_logs_is_monitored_alike_on_every_rank(monitor: str, validated: bool, tmp_path: Path) -> None:
    assert run_ranks(train, str(tmp_path), validated, monitor, processes=RANKS) == [0] * RANKS
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(other == found[0] for other in found)
    # the second epoch is no better for what stops, and better for what keeps weights
    assert (found[0]["best"], found[0]["epochs"]) == (ALIKE[monitor] + 10, 2)
    assert found[0]["rate"] == 0.05
    expected = [{name: value + 10 * epoch for name, value in ALIKE.items()} for epoch in range(2)]
    assert found[0]["noted"] == (expected if validated else [])


#: numbers in batches of a batch sampler, dealt to two ranks in turn
BY_SIZE = [[0, 1, 2, 3, 4], [5], [6, 7], [8, 9, 10]]


class Means(Steps):
    """Logs the mean of each batch, in training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train", batch[0].mean(), on_step=False, on_epoch=True, sync_dist=True)
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch[0].mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_by_size(folder: str, window: int) -> None:
    data = DataLoader(TensorDataset(torch.arange(11.0)[:, None]), batch_sampler=BY_SIZE)
    trainer = Trainer(strategy="ddp", max_epochs=1, accumulate_grad_batches=window, enable_progress_bar=False)
    trainer.fit(Means(), data, data)
    found = [float(trainer.callback_metrics[name]) for name in ("train", "val")]
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("window", [1, 2])
def test_means_weigh_batches_by_their_size_over_ranks(window: int, tmp_path: Path) -> None:
    assert run_ranks(train_by_size, str(tmp_path), window, processes=2) == [0, 0]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[5.0, 5.0]] * 2
