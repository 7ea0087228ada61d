"""Logged values as a module finds them in each hook, beside what it finds there under Lightning's Trainer."""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from midstride.engine import Trainer
from midstride.engine.testing import assert_resumes_exactly

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L

pytestmark = pytest.mark.filterwarnings("ignore")

#: a call of `self.log`: name, what is logged ("number", or an attribute of the module), and the options
Call = tuple[str, str, dict[str, Any]]
TRAINING = ("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
VALIDATION = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
)
BOTH: dict[str, Any] = {"on_step": True, "on_epoch": True, "prog_bar": True}
OF_EPOCH: dict[str, Any] = {"on_step": False, "on_epoch": True}
OF_STEP: dict[str, Any] = {"on_step": True, "on_epoch": False, "prog_bar": True}


class Noting(L.LightningModule):
    """Logs what `calls` says, by hook, and notes the values that the Trainer has before and after."""

    def __init__(self, calls: Mapping[str, Sequence[Call]]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.mean, self.val_mean = MeanMetric(), MeanMetric()
        self.some = MetricCollection({"of some": MeanMetric(), "largest": MaxMetric()})
        self.calls, self.found, self.count = calls, list[Any](), 0.0

    def hook(self, name: str, batch: Any = None) -> None:
        self.note(name)
        for called, what, options in self.calls.get(name, ()):
            self.count += 1.0
            if what == "number":
                self.log(called, torch.tensor(self.count), **options)
                continue
            metric = getattr(self, what)
            metric(batch[0][:, 0])
            if isinstance(metric, MetricCollection):
                self.log_dict(metric, **options)  # type: ignore[arg-type]
            else:
                self.log(called, metric, **options)
        self.note(name)

    def note(self, name: str) -> None:
        trainer = self.trainer
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        # in 32 bits, which Lightning keeps: what is for the progress bar has 64 here
        self.found.append((name, *({key: float(torch.tensor(float(kind[key]))) for key in kind} for kind in kinds)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hook("training_step", batch)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hook("validation_step", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _hook(name: str) -> Callable[..., None]:
    return lambda self, *_: self.hook(name)


for _name in (*TRAINING, *VALIDATION):
    setattr(Noting, _name, _hook(_name))

#: what is logged in each hook, and the options of both Trainers
CASES: dict[str, tuple[dict[str, list[Call]], dict[str, Any]]] = {
    "by default": ({"training_step": [("x", "number", {})], "validation_step": [("v", "number", {})]}, {}),
    "for step and epoch": ({"training_step": [("x", "number", BOTH)]}, {}),
    "for step and epoch, in validation": ({"validation_step": [("v", "number", BOTH)]}, {}),
    "for the steps of a validation": ({"validation_step": [("v", "number", OF_STEP)]}, {}),
    "for the epoch": ({"training_step": [("x", "number", OF_EPOCH)]}, {}),
    "with validations in between": (
        {"training_step": [("x", "number", BOTH)], "validation_step": [("v", "number", BOTH)]},
        {"val_check_interval": 1},
    ),
    "in windows of two batches": ({"training_step": [("x", "number", BOTH)]}, {"accumulate_grad_batches": 2}),
    "largest, smallest, sum": (
        {"training_step": [(one, "number", {**BOTH, "reduce_fx": one}) for one in ("max", "MIN", "sum")]},
        {},
    ),
    "with weights": ({"training_step": [("x", "number", {**BOTH, "batch_size": 3})]}, {}),
    "over ranks": ({"training_step": [("x", "number", {**BOTH, "sync_dist": True})]}, {}),
    "in every hook": ({name: [(name, "number", {"prog_bar": True})] for name in (*TRAINING, *VALIDATION[:-1])}, {}),
    "in every hook of an epoch, for the epoch": (
        {name: [(name, "number", {"on_epoch": True, "prog_bar": True})] for name in (TRAINING[0], TRAINING[-1])},
        {},
    ),
    "in every hook of a batch, for both": (
        {name: [(name, "number", BOTH)] for name in (*TRAINING[1:3], *VALIDATION[2:4])},
        {},
    ),
    "a metric for both": ({"training_step": [("m", "mean", BOTH)], "validation_step": [("v", "val_mean", BOTH)]}, {}),
    "a metric of both stages": (
        {"training_step": [("m", "mean", OF_EPOCH)], "validation_step": [("m", "mean", {})]},
        {},
    ),
    "for step and epoch, and once in validation": (
        {"training_step": [("x", "number", BOTH)], "validation_step": [("x", "number", {"prog_bar": True})]},
        {},
    ),
    "for the epoch, and for both in validation": (
        {"training_step": [("x", "number", OF_EPOCH)], "validation_step": [("x", "number", BOTH)]},
        {},
    ),
    "a collection for both": ({"training_step": [("", "some", BOTH)]}, {}),
}


def _fit(trainer: Any, calls: Mapping[str, Sequence[Call]]) -> list[Any]:
    module = Noting(calls)
    samples = [TensorDataset(torch.arange(float(size))[:, None]) for size in (5, 3)]
    trainer.fit(module, *(DataLoader(of, 2) for of in samples))
    return module.found


def _beside(calls: Mapping[str, Sequence[Call]], options: Mapping[str, Any]) -> list[list[Any]]:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = L.Trainer(max_epochs=2, accelerator="cpu", num_sanity_val_steps=0, **quiet, **options)
    return [_fit(theirs, calls), _fit(Trainer(max_epochs=2, enable_progress_bar=False, **options), calls)]


@pytest.mark.parametrize("case", CASES)
def test_every_hook_finds_the_values_that_it_finds_in_lightning(case: str) -> None:
    theirs, ours = _beside(*CASES[case])
    # NaN, of a metric that the end of a validation has reset, is equal to itself as text alone
    assert [repr(_sorted(one)) for one in ours] == [repr(_sorted(one)) for one in theirs]


def _sorted(noted: Any) -> Any:
    name, *kinds = noted
    return name, *(dict(sorted(kind.items())) for kind in kinds)


def test_an_evaluation_returns_what_is_for_both_under_two_names() -> None:
    """Two batches of two and one: 1 and 2 are logged, and the mean over samples is 4/3."""
    module = Noting({"validation_step": [("v", "number", BOTH)]})
    found = Trainer(enable_progress_bar=False).validate(module, DataLoader(TensorDataset(torch.ones(3, 1)), 2))
    assert found == {name: pytest.approx(4 / 3) for name in ("v", "v_epoch")}


def test_a_metric_has_its_batch_value_until_the_epoch_ends() -> None:
    """Lightning has no value for the epoch then; here `metrics.csv` has one, of a metric that is only updated too."""
    theirs, ours = _beside({"training_step": [("m", "mean", {})]}, {})
    before = next(at for at, (name, *_) in enumerate(ours) if name == "on_train_epoch_end")
    assert before > 10
    assert ours[:before] == theirs[:before]
    assert (theirs[before][1], ours[before][1]) == ({"m": 4.0}, {"m": 2.0})


def test_a_metric_of_both_stages_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: dict[str, list[Call]] = {"training_step": [("t", "mean", OF_EPOCH)], "validation_step": [("v", "mean", {})]}
    with caplog.at_level(logging.WARNING):
        found = _fit(Trainer(max_epochs=2, enable_progress_bar=False), calls)
    assert caplog.text.count("the metric mean is logged in training and in an evaluation") == 1
    assert math.isnan(found[-1][1]["t"])


class Following(Noting):
    """Is trained by the values that it finds: what a resumed attempt does not find alike is in its weights."""

    def __init__(self) -> None:
        both: list[Call] = [("x", "number", BOTH), ("m", "mean", BOTH)]
        super().__init__({"training_step": both, "validation_step": [("v", "number", BOTH)]})

    def note(self, name: str) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self.trainer
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        seen = [len(kind) + float(sum(map(float, kind.values()))) for kind in kinds]
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * (1.0 + torch.tensor(seen).sin().sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_resumed_attempt_finds_the_same_values() -> None:
    data = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), 2)

    class WithData(Following):
        def val_dataloader(self) -> Any:
            return data

        def train_dataloader(self) -> Any:
            return data

    assert_resumes_exactly(WithData, steps=6, val_check_interval=2)  # type: ignore[arg-type]
