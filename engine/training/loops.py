"""The loops: training and evaluation, a page each.

Between two batches everything that decides what comes next stands in the trainer's parts, so a
snapshot taken at a boundary, in training or in the middle of a validation, is a place to go on from.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from midstride.engine.data.loader import Feed
from midstride.engine.errors import NotExact, UserError
from midstride.engine.modules.hooks import step_end
from midstride.engine.session.heartbeat import Phase
from midstride.engine.training.boundary import Boundaries
from midstride.engine.training.optimizer_step import Optimization
from midstride.engine.training.uneven_ranks import turns, without_trace
from midstride.engine.trees import samples_in

if TYPE_CHECKING:
    from midstride.engine.training.trainer import Trainer

__all__ = ["EvaluationLoop", "FitLoop"]


class FitLoop:
    """Epochs of batches, with validation in between.

    Args:
        trainer: whose parts are advanced.
        loader: the training loader.
        validation: the loop to run when a validation is due; None without validation loaders.
    """

    def __init__(self, trainer: "Trainer", loader: Feed, validation: "EvaluationLoop | None") -> None:
        self.trainer, self.loader, self.validation = trainer, loader, validation
        self.progress = trainer.progress
        self.batches = loader.expected
        self.optimization = Optimization(trainer, loader)
        self.boundaries = Boundaries(trainer)
        if loader.is_sized and self.progress.batch > len(loader):
            raise NotExact(
                f"the run stands at batch {self.progress.batch} of its epoch, which has {len(loader)} now: "
                "start it with the data and batch size it had, or start over under another run name."
            )
        self.val_every = None if validation is None else self._val_every(trainer.options.val_check_interval)

    def _val_every(self, interval: float) -> int | None:
        """Return the batches between validations; None for one at the end of each epoch."""
        if interval == 1.0 and isinstance(interval, float):
            return None
        if self.batches is None and isinstance(interval, float):
            raise UserError(
                f"val_check_interval={interval} is a share of an epoch, and how long one is, only reading the training "
                "data to their end tells. Use a number of batches, or 1.0 for the end of each epoch."
            )
        if self.loader.is_sized and interval > len(self.loader):
            raise UserError(
                f"val_check_interval={interval} batches, and an epoch has {self.batches}: it would never be due. "
                "Use a smaller number, or a share of the epoch such as 1.0."
            )
        return interval if isinstance(interval, int) else max(1, int((self.batches or 0) * interval))

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
        if self.progress.at_end:
            self.end_epoch()  # resumed between an epoch's last step and its end
        while not self.is_done():
            self.epoch()
        self.trainer.heartbeat.phase = Phase.EVALUATING  # from here on nothing beats any more
        self.trainer.hooks.call("on_train_end")

    def epoch(self) -> None:
        """Train to the end of this epoch, or to the end of the fit if that comes first."""
        trainer, progress = self.trainer, self.progress
        if not progress.in_epoch:
            progress.in_epoch = True
            trainer.hooks.call("on_train_epoch_start")
        batches = self.loader.batches(progress.epoch, progress.batch)
        while not progress.at_end and not self.is_done():
            trainer.strike("fetch")
            trainer.heartbeat.begin()
            batch = trainer.received(next(batches))
            trainer.heartbeat.worked()
            trainer.heartbeat.batch()
            if progress.batch == 0:
                self._check_order()
            self.batch(batch)
        if progress.at_end:
            self.end_epoch()

    def _check_order(self) -> None:
        """Enter what the epoch's sampler gave; raise if ranks that share it were given different orders."""
        trainer, order = self.trainer, self.loader.shared_order()
        if (planned := self.loader.planned()) is not None:
            trainer.samples.plan(self.progress.epoch, planned)
        if order is not None and len({*(orders := trainer.strategy.gather(order))}) > 1:
            raise UserError(
                f"the ranks share what their samplers give, and in epoch {self.progress.epoch} those differ (digests "
                f"{', '.join(orders)}): training has changed each of them alone. Exchange what they are told, by "
                "torch.distributed.all_gather_object or the like, or say use_distributed_sampler=False."
            )

    def batch(self, batch: Any) -> None:
        """Train on one batch; at the end of an accumulation window that is one step."""
        trainer, progress = self.trainer, self.progress
        index = progress.batch
        trainer.logged.batch = batch
        if trainer.recorder is not None:
            given = self.loader.given
            trainer.samples.enter(progress.epoch, index, given, samples_in(batch) if given is None else len(given))
        trainer.hooks.call("on_train_batch_start", batch, index)
        outputs = self.optimization.train(batch, index)
        progress.batch += 1
        progress.at_end = self.loader.at_end
        stepped = self.optimization.stepped
        if stepped:
            progress.stepped()
        trainer.hooks.call("on_train_batch_end", outputs, batch, index)
        if stepped:
            self.optimization.step_schedulers("step", progress.step)
            self.boundaries.stepped(self.batches, outputs)
        else:
            self.boundaries.in_window()
        self.validate_if_due()

    def validate_if_due(self) -> None:
        """Validate where the interval says so, once at each such place, finishing one that was broken off."""
        progress = self.progress
        if self.validation is None or progress.validated == progress.batch:
            return
        if progress.at_end if self.val_every is None else progress.batch % self.val_every == 0:
            with self.trainer.heartbeat.during(Phase.EVALUATING):
                self.validation.run()
            progress.validated = progress.batch

    def end_epoch(self) -> None:
        """Reduce what the epoch logged, step its schedulers, and count it."""
        trainer, progress = self.trainer, self.progress
        with trainer.heartbeat.during(Phase.EVALUATING):
            trainer.strike("epoch_end")
            with trainer.logged.ending_epoch():
                trainer.hooks.call("on_train_epoch_end", of="module")  # what it logs belongs to this epoch
            trainer.logged.close_epoch()
            trainer.hooks.call("on_train_epoch_end", of="callbacks")
        self.optimization.step_schedulers("epoch", progress.epoch + 1)
        progress.next_epoch()


class EvaluationLoop:
    """Every batch of every loader once; ranks may have different numbers of them.

    The engine puts no collective inside a step. Where the strategy does, ranks without a batch join in: see `turns`.

    Args:
        trainer: whose parts are used.
        stage: "validate" (inside a fit its place is part of progress, and snapshots may be taken in it) or "test".
        loaders: one loop over each, in order.
    """

    def __init__(self, trainer: "Trainer", stage: Literal["validate", "test"], loaders: Sequence[Feed]) -> None:
        self.trainer, self.stage, self.loaders = trainer, stage, loaders
        self.prefix = {"validate": "validation", "test": "test"}[stage]
        self.boundaries = Boundaries(trainer)
        self.step_end = step_end(trainer.module, f"{self.prefix}_step")

    def run(self) -> dict[str, float]:
        """Evaluate, from wherever a broken-off evaluation stood; return the reduced values."""
        trainer, progress, hooks = self.trainer, self.trainer.progress, self.trainer.hooks
        trainer.logged.begin(self.stage)
        if not progress.validating:
            progress.validating, progress.val_loader, progress.val_batch = True, 0, 0
            hooks.call(f"on_{self.prefix}_start")
            hooks.call(f"on_{self.prefix}_epoch_start")
        with torch.no_grad(), trainer.modes.evaluating():
            while progress.val_loader < len(self.loaders):
                trainer.logged.begin(self.stage, progress.val_loader if len(self.loaders) > 1 else None)
                self.loader(progress.val_loader)
                progress.val_loader, progress.val_batch = progress.val_loader + 1, 0
        trainer.logged.begin(self.stage)
        hooks.call(f"on_{self.prefix}_epoch_end")
        values = trainer.logged.close_epoch()
        trainer.logged.begin("over")
        progress.validating = False
        hooks.call(f"on_{self.prefix}_end")
        if self.stage == "validate":
            trainer.reporter.emit("validation", step=progress.step, epoch=progress.epoch, metrics=values)
        trainer.logged.begin("train")
        return values

    def loader(self, number: int) -> None:
        """Evaluate one loader; a rank that has no batch left waits at the boundaries, or joins in others' steps."""
        trainer, progress = self.trainer, self.trainer.progress
        for batch, own in turns(trainer, self.loaders[number], progress.val_batch):
            if own:
                self.batch(trainer.received(batch), progress.val_batch, number)
            elif trainer.strategy.forward_is_collective:
                with without_trace(trainer):
                    self.step(trainer.received(batch), progress.val_batch, number)
            progress.val_batch += 1
            progress.after += 1
            if self.stage == "validate":
                self.boundaries.reached()
            else:
                trainer.strategy.mark_step()

    def batch(self, batch: Any, index: int, number: int) -> None:
        """Evaluate one batch of this rank's own."""
        hooks, extra = self.trainer.hooks, self._extra(number)
        self.trainer.logged.batch = batch
        hooks.call(f"on_{self.prefix}_batch_start", batch, index, *extra)
        outputs = self.step(batch, index, number)
        hooks.call(f"on_{self.prefix}_batch_end", outputs, batch, index, *extra)

    def step(self, batch: Any, index: int, number: int) -> Any:
        """Return what the user's step makes of a batch, with the unwrapped module: DDP's forward shares buffers."""
        trainer, name = self.trainer, f"{self.prefix}_step"
        with trainer.logged.heard(), trainer.precision.forward():
            outputs = trainer.strategy.evaluate(trainer.module, name, batch, index, *self._extra(number))
            return self.step_end(outputs, batch)

    def _extra(self, number: int) -> tuple[int, ...]:
        return (number,) if len(self.loaders) > 1 else ()
