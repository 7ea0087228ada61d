"""The modules of the law on Lightning, each with its data and what its Trainer is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from laws.lightning import beside, by_hand, own_methods, style
from laws.lightning.style import loader
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)


def loaders() -> dict[str, Any]:
    return {"train": loader(24), "val": loader(8)}


@dataclass
class Row:
    """One module.

    Args:
        module: makes it.
        data: makes what `fit` is given: a data module, loaders, or nothing.
        options: of both Trainers.
        callbacks: makes those of both.
        draws: random numbers are drawn in training, which Lightning does in another order.
    """

    module: Callable[[], L.LightningModule]
    data: Callable[[], Any] = loaders
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    draws: bool = False

    def made(self) -> tuple[L.LightningModule, dict[str, Any], list[Any]]:
        """Return a module, data and callbacks, as every life makes them."""
        torch.manual_seed(3)
        return self.module(), self.data(), self.callbacks()


ROWS = {
    "autoencoder": Row(style.AutoEncoder, lambda: {"train": loader(24)}),
    "classifier, ReduceLROnPlateau": Row(style.Classifier),
    "two lists": Row(style.TwoLists),
    "OneCycleLR": Row(
        style.OneCycle, options={"accumulate_grad_batches": 1}, callbacks=lambda: [LearningRateMonitor()]
    ),
    "outputs kept": Row(style.Outputs),
    "warm-up in optimizer_step": Row(own_methods.Warmup),
    "clipped by hook": Row(own_methods.Clipped),
    "accumulated and clipped": Row(style.TwoLists, options={"accumulate_grad_batches": 4, "max_epochs": 4}),
    "frozen backbone": Row(style.Transfer),
    "metric collections": Row(style.Collection),
    "dict and list of loaders": Row(style.Several, dict),
    "Lightning's combined loader": Row(own_methods.SideBySide, dict),
    "log of its own, loss of a step": Row(
        own_methods.Prefixed, options={"accumulate_grad_batches": 2, "max_epochs": 4}
    ),
    "weight averaging": Row(style.Averaged),
    "momentum encoder": Row(style.Momentum),
    "replay buffer": Row(style.Replay, dict),
    "data from the module's own acts": Row(style.Acting, dict),
    "checkpoint hooks": Row(own_methods.Checkpointed),
    "dropout and shuffle": Row(style.Noisy, dict, draws=True),
    "EMA callback": Row(style.AutoEncoder, callbacks=lambda: [beside.EMA()]),
    "own callback that stops": Row(style.Classifier, callbacks=lambda: [beside.Stopper()]),
    "Lightning's callbacks": Row(
        style.Classifier,
        options={"max_epochs": 4},
        callbacks=lambda: [
            EarlyStopping("val_loss", patience=1, min_delta=10.0),
            ModelCheckpoint(monitor="val_loss", save_top_k=1),
            LearningRateMonitor(logging_interval="step"),
        ],
    ),
    "callbacks of its own": Row(
        own_methods.Configured, options={"max_epochs": 5}, callbacks=lambda: [EarlyStopping("val_loss", patience=9)]
    ),
    "data module": Row(style.Classifier, lambda: {"data": beside.Parts()}),
    "GAN": Row(by_hand.GAN, draws=True),
    "GAN on a grid": Row(by_hand.GridGAN),
    "two optimizers with schedules": Row(by_hand.Scheduled),
    "toggled by its optimizers": Row(by_hand.Toggled),
    "accumulated by hand": Row(by_hand.Accumulated),
    "windows of several lengths": Row(
        style.TwoLists,
        options={"max_epochs": 4, "accumulate_grad_batches": 1},
        callbacks=lambda: [GradientAccumulationScheduler({1: 4, 2: 2})],
    ),
    "overfitting": Row(style.AutoEncoder, lambda: {"train": loader(24)}, {"overfit_batches": 3}),
    "plateaus by hand": Row(by_hand.Plateau, options={"max_epochs": 4}),
}
