"""Hooks beside Lightning's: their order, and what holds in each: modes, gradients, the place in the fit."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from midstride.engine import Trainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    from laws.lightning import style

pytestmark = pytest.mark.filterwarnings("ignore")

AROUND = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
FIT = ("fit_start", "fit_end", "before_backward", "after_backward", "before_optimizer_step")
HOOKS = [*FIT, *(f"{stage}_{where}" for stage in ("train", "validation", "test", "predict") for where in AROUND)]


class Noting(L.LightningModule):
    """Notes at every hook what holds there; one of its layers was frozen by eval()."""

    def __init__(self, stop: tuple[str, int] | None = None) -> None:
        """`stop` is a hook or a step, and at which of its calls, from 1, it ends the fit."""
        super().__init__()
        torch.manual_seed(7)
        self.stop, self.calls = stop, Counter[str]()
        self.frozen, self.layer = nn.Sequential(nn.BatchNorm1d(4)).eval(), nn.Linear(4, 1)
        self.notes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stop_if_asked("training_step")
        return self.layer(self.frozen(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("evaluation_step")

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def stop_if_asked(self, where: str) -> None:
        self.calls[where] += 1
        if self.stop == (where, self.calls[where]):
            self.trainer.should_stop = True

    def note(self, hook: str, *_: Any) -> None:
        frozen, grad = self.frozen[0], [None if p.grad is None else p.grad.sum().item() for p in self.parameters()]
        at = self.trainer.current_epoch, self.trainer.global_step
        # What the last step leaves behind is Lightning's until the next backward, and here until on_train_batch_end.
        gradients = (
            grad
            if hook.removeprefix("callback ") in ("train_batch_end", "after_backward", "before_optimizer_step")
            else None
        )
        self.notes.append((hook, self.training, frozen.training, torch.is_grad_enabled(), at, gradients))
        self.stop_if_asked(hook)


class Beside(L.Callback):
    """Notes when the hooks of a callback are called."""


def _hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hook called `name`, without its on_, of a module and of a callback."""
    given = {"before_backward": ", loss", "before_optimizer_step": ", optimizer"}.get(name, "")
    if "batch" in name:
        outputs = ", outputs" if name.endswith("end") else ""
        given = f"{outputs}, batch, batch_idx" + ("" if name.startswith("train") else ", dataloader_idx=0")
    of_module, of_callback = f"lambda self{given}: self", f"lambda self, trainer, module{given}: module"
    return eval(f"{of_module}.note({name!r})"), eval(f"{of_callback}.note('callback ' + {name!r})")


for name in HOOKS:
    for kind, hook in zip((Noting, Beside), _hooks(name), strict=True):
        setattr(kind, f"on_{name}", hook)

#: options of both Trainers, and which of its methods are called one after another
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "epochs": ({"max_epochs": 2}, ("fit", "validate", "test", "predict")),
    "windows": ({"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, ("fit",)),
    "a validation within an epoch": ({"max_epochs": 2, "val_check_interval": 2}, ("fit",)),
    "a validation every other epoch": ({"max_epochs": 3, "check_val_every_n_epoch": 2}, ("fit",)),
    "validations counted over epochs": (
        {"max_epochs": 3, "check_val_every_n_epoch": None, "val_check_interval": 5},
        ("fit",),
    ),
    "no validation": ({"max_epochs": 2, "limit_val_batches": 0, "limit_test_batches": 0}, ("fit", "validate", "test")),
    "a share of the batches": ({"max_epochs": 1, "limit_train_batches": 0.5, "limit_val_batches": 1}, ("fit", "test")),
}


#: where a fit is stopped: a hook or a step, and at which of its calls
STOPS = [
    *((name, count) for name in ("training_step", "train_batch_start", "train_batch_end") for count in (1, 2, 4, 6)),
    *(("train_epoch_start", 2), ("train_epoch_end", 1), ("train_start", 1), ("validation_end", 1)),
]
#: options of both Trainers in a fit that is stopped
STOPPED: list[dict[str, Any]] = [
    {},
    {"min_epochs": 2},
    {"min_steps": 3},
    {"min_epochs": 2, "min_steps": 7},
    {"val_check_interval": 3},
    {"val_check_interval": 3, "min_steps": 2},
    {"check_val_every_n_epoch": 2},
    {"check_val_every_n_epoch": None, "val_check_interval": 5},
    {"accumulate_grad_batches": 3},
    {"accumulate_grad_batches": 2, "min_steps": 2},
]


@pytest.mark.parametrize("case", CASES)
def test_hooks_come_as_in_lightning(case: str) -> None:
    options, verbs = CASES[case]
    expected, found = _beside(options, verbs)
    assert found == expected


@pytest.mark.parametrize(
    ("stop", "options"),
    [(stop, STOPPED[(at + more) % len(STOPPED)]) for at, stop in enumerate(STOPS) for more in (0, 5)],
    ids=str,
)
def test_a_stop_within_an_epoch_calls_lightnings_hooks(stop: tuple[str, int], options: dict[str, Any]) -> None:
    expected, found = _beside({"max_epochs": 3, **options}, ("fit",), stop)
    assert found == expected


def _beside(options: dict[str, Any], verbs: tuple[str, ...], stop: tuple[str, int] | None = None) -> list[list[Any]]:
    """Return what is noted under Lightning's Trainer, and under ours."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = partial(L.Trainer, accelerator="cpu", num_sanity_val_steps=0, callbacks=[Beside()], **quiet)
    notes = []
    for trainer in (theirs(**options), Trainer(**options, callbacks=[Beside()], enable_progress_bar=False)):
        module = Noting(stop)
        for verb in verbs:
            loaders = [style.loader(16), style.loader(8)] if verb == "fit" else [style.loader(8)]
            getattr(trainer, verb)(module, *loaders)
        assert stop is None or trainer.should_stop
        notes.append([*module.notes, (trainer.current_epoch, trainer.global_step)])
    return notes
