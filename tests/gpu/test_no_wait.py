"""Between snapshots the host waits for no device; what it reads later is what it would have read at once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.device_waits import WaitCounter, as_on_a_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, LearningRateMonitor, Trainer, TrainingModule
from midstride.engine.checkpointing.finite_losses import FiniteLosses
from midstride.engine.errors import LossNotFinite
from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.modules.progress import Progress
from midstride.engine.snapshots.reader import weights_at

STEPS = 24


class Module(TrainingModule):
    """Logs as `asked`; from step `bad` on its loss is not finite."""

    def __init__(self, bad: int | None = None, **asked: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.bad, self.asked = nn.Linear(4, 2), bad, asked

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss, **self.asked)
        return loss * float("nan") if self.bad == batch_idx else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam counts its steps on the host


class Between(Callback):
    """Counts the waits of each batch, from its start to the start of the next."""

    def __init__(self, counter: WaitCounter) -> None:
        self.counter, self.at_start = counter, list[int]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.at_start.append(self.counter.total)

    @property
    def waits(self) -> list[int]:
        """Those of each batch but the last, after which the epoch ends."""
        return [after - before for before, after in zip(self.at_start, self.at_start[1:], strict=False)]


def data() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(STEPS, 4, generator=drawn)), batch_size=1)


def fit(module: TrainingModule, run: Path, every_steps: int = 8, **options: Any) -> None:
    options = {"max_epochs": 1, "enable_progress_bar": False, "snapshots": {"every_steps": every_steps}, **options}
    Trainer(**options).fit(module, data(), run=run)


#: arguments of self.log, options of the Trainer
LOGGING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a plain log": ({}, {}),
    "for the epoch": ({"on_step": False, "on_epoch": True}, {}),
    "for both": ({"on_epoch": True}, {}),
    "the largest": ({"on_step": False, "on_epoch": True, "reduce_fx": "max"}, {}),
    "the smallest": ({"on_step": False, "on_epoch": True, "reduce_fx": "min"}, {}),
    "over the ranks": ({"sync_dist": True}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "clipped by value": ({}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "in windows": ({}, {"accumulate_grad_batches": 2}),
    "in two parts": ({}, {"strategy": "dp", "devices": 2}),
}


@pytest.mark.parametrize("case", LOGGING)
def test_no_step_between_snapshots_waits_for_the_device(case: str, tmp_path: Path) -> None:
    asked, options = LOGGING[case]
    fit(Module(**asked), tmp_path / "host", **options)
    with as_on_a_device(), WaitCounter() as counter:
        between = Between(counter)
        fit(Module(**asked), tmp_path / "device", **options, callbacks=[between])
    window = options.get("accumulate_grad_batches", 1)
    due = {8 * window * number - 1 for number in range(1, STEPS)}  # after these batches a snapshot is taken
    # After the first step it is tried once what the parts of the state give back.
    waits = {batch: count for batch, count in enumerate(between.waits) if batch >= window}
    assert {batch: count for batch, count in waits.items() if count and batch not in due} == {}
    assert all(waits[batch] for batch in due if batch in waits)  # there the counter counts
    assert (tmp_path / "device/metrics.csv").read_text() == (tmp_path / "host/metrics.csv").read_text()


class Counting(Module):
    """Logs what it counts in one place, in the numbers that rows have."""

    def __init__(self) -> None:
        super().__init__(on_epoch=True)
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("total", self.total.add_(1), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_value_is_logged_as_it_was_then(tmp_path: Path) -> None:
    fit(Counting(), tmp_path / "host")
    with as_on_a_device():
        fit(Counting(), tmp_path / "device")
    assert (tmp_path / "device/metrics.csv").read_text() == (tmp_path / "host/metrics.csv").read_text()


@pytest.mark.parametrize("bad", [0, 5, 7, 8, 22, STEPS - 1])
def test_nothing_is_written_after_a_loss_that_is_not_finite(bad: int, tmp_path: Path) -> None:
    words = rf"the loss is nan \(epoch 0, batch {bad}, step {bad + 1}, "
    with as_on_a_device(), pytest.raises(LossNotFinite, match=words):
        fit(Module(bad), tmp_path)
    kept = sorted(int(path.name.partition("-")[0]) for path in (tmp_path / "snapshots").glob("*"))
    assert kept == [step for step in (8, 16, 24) if step <= bad]
    assert not [*tmp_path.glob("last/*")]


def test_losses_wait_on_their_device_for_fifty_steps_at_most() -> None:
    with as_on_a_device():
        progress = Progress()
        losses = FiniteLosses(progress, 0, needed=True)
        for number in range(49):
            losses.check(torch.tensor(float("nan") if number == 3 else 1.0))
            progress.batch_done(at_end=False, stepped=True)
        with pytest.raises(LossNotFinite, match=r"the loss is nan \(epoch 0, batch 3, step 4, "):
            losses.check(torch.tensor(1.0))


class Saving(Callback):
    """Keeps the weights after each batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_weights("best")


def test_weights_are_not_kept_after_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    with as_on_a_device(), pytest.raises(LossNotFinite, match="batch 5"):
        fit(Module(5), tmp_path, callbacks=[Saving()])
    assert all(value.isfinite().all() for value in weights_at(f"{tmp_path}/best").state_dict.values())


def test_without_a_run_a_loss_that_is_not_finite_ends_the_fit() -> None:
    with as_on_a_device(), pytest.raises(LossNotFinite, match="batch 3"):
        Trainer(max_epochs=1, enable_progress_bar=False).fit(Module(3), data())


def test_a_learning_rate_on_a_device_is_kept_as_it_is_then() -> None:
    rate = torch.tensor(0.5)
    trainer = Trainer(max_epochs=1)
    stand_in: Any = SimpleNamespace(
        optimizers=[SimpleNamespace(param_groups=[{"lr": rate}])], metric_logger=trainer.metric_logger
    )
    with as_on_a_device(), WaitCounter() as counter:
        LearningRateMonitor().on_train_batch_start(stand_in, Module(), None, 0)
    assert counter.total == 0
    rate.fill_(0.25)
    assert trainer.metric_logger.rows.state_dict()["pending"]["lr"] == 0.5


def test_a_logged_device_value_is_a_tensor_on_its_device() -> None:
    trainer = Trainer(max_epochs=1)
    trainer.metric_logger.values = {"host": 0.1, "device": torch.tensor(0.1, dtype=torch.float64)}
    with WaitCounter() as counter:
        host, device = LightningTrainer(trainer).callback_metrics.values()
    assert counter.total == 0
    assert (host.dtype, device.dtype) == (torch.float32, torch.float32)
    assert host == device
