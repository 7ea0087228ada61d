"""Schedulers beside Lightning's: when each steps, with what, and which of two goes first."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from midstride.engine import Trainer
from midstride.engine.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    from laws.lightning import style

pytestmark = pytest.mark.filterwarnings("ignore")

Schedules = Callable[[torch.optim.Optimizer], list[Any]]
_Plateau = partial(ReduceLROnPlateau, patience=0, threshold=10.0)


class Scheduled(style.Classifier):
    """Notes the rate of every batch."""

    def __init__(self, schedules: Schedules) -> None:
        torch.manual_seed(7)
        super().__init__()
        self.schedules, self.rates, self.watched = schedules, list[float](), list[bool]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.is_last_batch or self.of_steps:  # see docs/lightning.md
            self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedules = self.schedules(optimizer)
        self.of_steps = all(type(one) is dict and one.get("interval") == "step" for one in schedules)
        return [optimizer], schedules


class ByItself(Scheduled):
    """Steps its schedulers as Lightning's documentation writes it."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.watched.append(metric is not None)
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)


#: what makes the schedulers, and the options of both Trainers
CASES: dict[str, tuple[Schedules, dict[str, Any]]] = {
    "every second batch of an epoch of five": (
        lambda o: [{"scheduler": StepLR(o, 1), "interval": "step", "frequency": 2}],
        {"limit_train_batches": 5},
    ),
    "every fourth batch, in windows of two": (
        lambda o: [{"scheduler": StepLR(o, 1), "interval": "step", "frequency": 4}],
        {"accumulate_grad_batches": 2},
    ),
    "every second epoch": (lambda o: [{"scheduler": StepLR(o, 1), "frequency": 2}], {}),
    "one that watches what another needs not, before it": (
        lambda o: [{"scheduler": _Plateau(o), "monitor": "val_loss"}, CosineAnnealingLR(o, 7)],
        {},
    ),
    "a monitor of one that watches nothing": (lambda o: [{"scheduler": StepLR(o, 1), "monitor": "val_loss"}], {}),
    "a value that may be missing": (
        lambda o: [{"scheduler": _Plateau(o), "monitor": "val_loss", "strict": False}],
        {"check_val_every_n_epoch": 2},
    ),
    "after each validation within an epoch, with its value": (
        lambda o: [{"scheduler": _Plateau(o), "monitor": "val_loss", "interval": "step", "frequency": 2}],
        {"val_check_interval": 2},
    ),
    "after each batch, in windows, with the newest value of a validation": (
        lambda o: [{"scheduler": _Plateau(o), "monitor": "val_loss", "interval": "step", "strict": False}],
        {"val_check_interval": 3, "accumulate_grad_batches": 2},
    ),
    "one of another make that watches": (
        lambda o: [{"scheduler": StepLR(o, 1), "monitor": "val_loss", "reduce_on_plateau": True}],
        {},
    ),
}


@pytest.mark.parametrize("kind", [Scheduled, ByItself])
@pytest.mark.parametrize("case", CASES)
def test_schedulers_step_as_in_lightning(case: str, kind: type[Scheduled]) -> None:
    schedules, options = CASES[case]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = L.Trainer(max_epochs=4, accelerator="cpu", num_sanity_val_steps=0, **quiet, **options)
    ours = Trainer(max_epochs=4, enable_progress_bar=False, **options)
    modules = []
    for trainer in (theirs, ours):
        module: Any = kind(schedules)
        trainer.fit(module, style.loader(24), style.loader(8))  # type: ignore[attr-defined]
        modules.append(module)
    expected, found = modules
    assert (found.rates, found.watched) == (expected.rates, expected.watched)
    assert all(map(torch.equal, found.state_dict().values(), expected.state_dict().values()))


def test_what_lightning_says_of_a_scheduler_is_found_beside_it() -> None:
    module = Scheduled(lambda o: [{"scheduler": StepLR(o, 1), "interval": "step", "name": "rate"}])
    trainer = Trainer(max_epochs=1, enable_progress_bar=False)
    trainer.fit(module, style.loader(8), style.loader(8))  # type: ignore[arg-type]
    (config,) = trainer.lr_scheduler_configs  # type: ignore[attr-defined]
    assert (config.name, config.strict, config.reduce_on_plateau, config.frequency) == ("rate", True, False, 1)


def test_each_fit_says_once_that_a_value_may_be_missing(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        module = Scheduled(lambda o: [{"scheduler": _Plateau(o), "monitor": "none", "strict": False}])
        Trainer(max_epochs=3, enable_progress_bar=False).fit(module, style.loader(8))  # type: ignore[arg-type]
    assert caplog.text.count("ReduceLROnPlateau watches 'none', which is not logged yet") == 2


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_missing_monitored_value_says_how_to_wait_for_it(interval: str) -> None:
    module = Scheduled(lambda o: [{"scheduler": _Plateau(o), "monitor": "none", "interval": interval}])
    with pytest.raises(UserError, match=r'watches .none., not logged; .*With "strict": False .* it waits'):
        Trainer(max_epochs=1, enable_progress_bar=False).fit(module, style.loader(8))  # type: ignore[arg-type]
