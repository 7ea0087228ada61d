"""Hooks beside Lightning's: their order, and what holds in each: modes, gradients, the place in the fit."""

import warnings
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

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.frozen, self.layer = nn.Sequential(nn.BatchNorm1d(4)).eval(), nn.Linear(4, 1)
        self.notes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(self.frozen(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("evaluation_step")

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

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
    "no validation": ({"max_epochs": 2, "limit_val_batches": 0}, ("fit",)),
    "a share of the batches": ({"max_epochs": 1, "limit_train_batches": 0.5, "limit_val_batches": 1}, ("fit", "test")),
}


@pytest.mark.parametrize("case", CASES)
def test_hooks_come_as_in_lightning(case: str) -> None:
    options, verbs = CASES[case]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = partial(L.Trainer, accelerator="cpu", num_sanity_val_steps=0, callbacks=[Beside()], **quiet)
    notes = []
    for trainer in (theirs(**options), Trainer(**options, callbacks=[Beside()], enable_progress_bar=False)):
        module = Noting()
        for verb in verbs:
            loaders = [style.loader(16), style.loader(8)] if verb == "fit" else [style.loader(8)]
            getattr(trainer, verb)(module, *loaders)
        notes.append(module.notes)
    assert notes[1] == notes[0]
