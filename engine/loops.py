"""The loops: training and evaluation, a page each.

Between two batches everything that decides what comes next stands in the trainer's parts, so a
snapshot taken at a boundary, in training or in the middle of a validation, is a place to go on from.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from midstride.engine.data.loader import ExactLoader
from midstride.engine.errors import NotExact, UserError
from midstride.engine.hooks import calling
from midstride.engine.optimization import Optimization

if TYPE_CHECKING:
    from midstride.engine.trainer import Trainer

__all__ = ["EvaluationLoop", "FitLoop"]


class FitLoop:
    """Epochs of batches, with validation in between.

    Args:
        trainer: whose parts are advanced.
        loader: the training loader.
        validation: the loop to run when a validation is due; None without validation loaders.
    """

    def __init__(self, trainer: "Trainer", loader: ExactLoader, validation: "EvaluationLoop | None") -> None:
        self.trainer, self.loader, self.validation = trainer, loader, validation
        self.progress = trainer.progress
        self.batches = len(loader)
        self.optimization = Optimization(trainer, self.batches)
        interval = trainer.options.val_check_interval
        if isinstance(interval, int) and interval > self.batches and validation is not None:
            raise UserError(
                f"val_check_interval={interval} batches, and an epoch has {self.batches}: it would never be due. "
                "Use a smaller number, or a share of the epoch such as 1.0."
            )
        if self.progress.batch > self.batches:
            raise NotExact(
                f"the run stands at batch {self.progress.batch} of its epoch, which has {self.batches} now: "
                "start it with the data and batch size it had, or start over under another run name."
            )
        self.val_every = interval if isinstance(interval, int) else max(1, int(self.batches * interval))

    def is_done(self) -> bool:
        """Return whether the fit has come to its end."""
        options, progress = self.trainer.options, self.progress
        return (
            progress.stop
            or (options.max_epochs is not None and progress.epoch >= options.max_epochs)
            or (options.max_steps is not None and progress.step >= options.max_steps)
        )

    def run(self) -> None:
        """Train to the end, from wherever progress stands."""
        self.validate_if_due()  # resumed between a step and its validation
        if self.progress.in_epoch and self.progress.batch == self.batches:
            self.end_epoch()  # resumed between an epoch's last step and its end
        while not self.is_done():
            self.epoch()
        self.trainer.hooks.call("on_train_end")

    def epoch(self) -> None:
        """Train to the end of this epoch, or to the end of the fit if that comes first."""
        trainer, progress = self.trainer, self.progress
        if not progress.in_epoch:
            progress.in_epoch = True
            trainer.hooks.call("on_train_epoch_start")
        batches = self.loader.batches(progress.epoch, progress.batch)
        while progress.batch < self.batches and not self.is_done():
            trainer.strike("fetch")
            self.batch(trainer.received(next(batches)))
        if progress.batch == self.batches:
            self.end_epoch()

    def batch(self, batch: Any) -> None:
        """Train on one batch; at the end of an accumulation window that is one step."""
        trainer, progress = self.trainer, self.progress
        index = progress.batch
        trainer.logged.batch = batch
        trainer.hooks.call("on_train_batch_start", batch, index)
        outputs = self.optimization.train(batch, index)
        progress.batch += 1
        stepped = self.optimization.closes_window(index)
        if stepped:
            progress.stepped()
        trainer.hooks.call("on_train_batch_end", outputs, batch, index)
        if stepped:
            self.optimization.step_schedulers("step", progress.step)
            trainer.stepped(self.batches, outputs)
        self.validate_if_due()

    def validate_if_due(self) -> None:
        """Validate where the interval says so, once at each such place, finishing one that was broken off."""
        progress = self.progress
        due = progress.batch and progress.batch % self.val_every == 0 and progress.validated != progress.batch
        if due and self.validation is not None:
            self.validation.run()
            progress.validated = progress.batch

    def end_epoch(self) -> None:
        """Reduce what the epoch logged, step its schedulers, and count it."""
        trainer, progress = self.trainer, self.progress
        trainer.strike("epoch_end")
        with trainer.logged.ending_epoch():
            trainer.hooks.call("on_train_epoch_end", of="module")  # what it logs belongs to this epoch
        trainer.logged.close_epoch()
        trainer.hooks.call("on_train_epoch_end", of="callbacks")
        self.optimization.step_schedulers("epoch", progress.epoch + 1)
        progress.next_epoch()


class EvaluationLoop:
    """Every batch of every loader once, without a collective inside a step: ranks may have different numbers.

    Args:
        trainer: whose parts are used.
        stage: "validate" (inside a fit its place is part of progress, and snapshots may be taken in it) or "test".
        loaders: one loop over each, in order.
    """

    def __init__(self, trainer: "Trainer", stage: Literal["validate", "test"], loaders: Sequence[ExactLoader]) -> None:
        self.trainer, self.stage, self.loaders = trainer, stage, loaders
        self.prefix = {"validate": "validation", "test": "test"}[stage]

    def run(self) -> dict[str, float]:
        """Evaluate, from wherever a broken-off evaluation stood; return the reduced values."""
        trainer, progress, hooks = self.trainer, self.trainer.progress, self.trainer.hooks
        trainer.logged.stage = self.stage
        if not progress.validating:
            progress.validating, progress.val_loader, progress.val_batch = True, 0, 0
            hooks.call(f"on_{self.prefix}_start")
            hooks.call(f"on_{self.prefix}_epoch_start")
        with torch.no_grad(), trainer.modes.evaluating():
            while progress.val_loader < len(self.loaders):
                self.loader(progress.val_loader)
                progress.val_loader, progress.val_batch = progress.val_loader + 1, 0
        hooks.call(f"on_{self.prefix}_epoch_end")
        values = trainer.logged.close_epoch()
        progress.validating = False
        hooks.call(f"on_{self.prefix}_end")
        trainer.evaluated(self.stage, values)
        trainer.logged.stage = "train"
        return values

    def loader(self, number: int) -> None:
        """Evaluate one loader; a rank that has no batch left waits at the boundaries, not in a step."""
        trainer, progress = self.trainer, self.trainer.progress
        loader = self.loaders[number]
        mine = len(loader)
        batches = loader.batches(0, progress.val_batch)
        while progress.val_batch < loader.longest:
            index = progress.val_batch
            trainer.strike("validation")
            if index < mine:
                self.batch(trainer.received(next(batches)), index, number)
            progress.val_batch += 1
            progress.after += 1
            if self.stage == "validate":
                trainer.boundary()

    def batch(self, batch: Any, index: int, number: int) -> None:
        """Evaluate one batch with the unwrapped module: a wrapped one would talk to the other ranks."""
        trainer, module, name = self.trainer, self.trainer.module, type(self.trainer.module).__name__
        extra = (number,) if len(self.loaders) > 1 else ()
        trainer.logged.batch = batch
        trainer.hooks.call(f"on_{self.prefix}_batch_start", batch, index, *extra)
        with trainer.precision.forward():
            step = f"{self.prefix}_step"
            outputs = calling(f"{name}.{step}", getattr(module, step), batch, index, *extra)
            outputs = calling(f"{name}.{step}_end", getattr(module, f"{step}_end"), outputs)
        trainer.hooks.call(f"on_{self.prefix}_batch_end", outputs, batch, index, *extra)
