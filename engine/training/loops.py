"""The loops: training and evaluation, a page each.

Between two batches everything that decides what comes next stands in the context's parts, so a
snapshot taken at a boundary, in training or in the middle of a validation, is a place to go on from.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import NotExact, UserError
from midstride.engine.modules.hooks import step_end
from midstride.engine.session.heartbeat import Phase
from midstride.engine.training.boundary import Boundaries
from midstride.engine.training.checkpointing.checkpointer import Recorder
from midstride.engine.training.context import EvaluationContext, FitContext
from midstride.engine.training.optimizer_step import Optimization
from midstride.engine.training.uneven_ranks import turns, without_trace
from midstride.engine.trees import samples_in

__all__ = ["EvaluationLoop", "FitLoop"]


class FitLoop:
    """Epochs of batches, with validation in between.

    Args:
        context: whose parts are advanced.
        recorder: takes the snapshots; None for a fit that is not kept.
    """

    def __init__(self, context: FitContext, recorder: Recorder | None = None) -> None:
        self.context, self.recorder = context, recorder
        self.progress, self.loader = context.progress, context.feeds.training
        loader = self.loader
        self.batches = loader.expected
        self.optimization = Optimization(context)
        self.boundaries = Boundaries(context, recorder)
        validation = context.feeds.validation
        self.validation = EvaluationLoop(context, "validate", validation, recorder) if validation else None
        if loader.is_sized and self.progress.batch > len(loader):
            raise NotExact(
                f"the run stands at batch {self.progress.batch} of its epoch, which has {len(loader)} now: "
                "start it with the data and batch size it had, or start over under another run name."
            )
        self.val_every = None if self.validation is None else self._val_every(context.options.val_check_interval)

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
        options, progress = self.context.options, self.progress
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
        self.context.heartbeat.enter(Phase.EVALUATING)  # from here on nothing beats any more
        self.context.hooks.call("on_train_end")

    def epoch(self) -> None:
        """Train to the end of this epoch, or to the end of the fit if that comes first."""
        context, progress = self.context, self.progress
        if not progress.in_epoch:
            progress.begin_epoch()
            context.hooks.call("on_train_epoch_start")
        batches = self.loader.batches(progress.epoch, progress.batch)
        while not progress.at_end and not self.is_done():
            context.inject_fault("fetch")
            context.heartbeat.begin()
            batch = context.to_device(next(batches))
            context.heartbeat.worked()
            context.heartbeat.batch()
            if progress.batch == 0:
                self._check_order()
            self.batch(batch)
        if progress.at_end:
            self.end_epoch()

    def _check_order(self) -> None:
        """Enter what the epoch's sampler gave; raise if ranks that share it were given different orders."""
        context, order = self.context, self.loader.shared_order()
        if (planned := self.loader.planned()) is not None:
            context.samples.plan(self.progress.epoch, planned)
        if order is not None and len({*(orders := context.strategy.gather(order))}) > 1:
            raise UserError(
                f"the ranks share what their samplers give, and in epoch {self.progress.epoch} those differ (digests "
                f"{', '.join(orders)}): training has changed each of them alone. Exchange what they are told, by "
                "torch.distributed.all_gather_object or the like, or say use_distributed_sampler=False."
            )

    def batch(self, batch: Any) -> None:
        """Train on one batch; at the end of an accumulation window that is one step."""
        context, progress = self.context, self.progress
        index = progress.batch
        context.logged.begin_batch(batch)
        if self.recorder is not None:
            given = self.loader.given
            context.samples.enter(progress.epoch, index, given, samples_in(batch) if given is None else len(given))
        context.hooks.call("on_train_batch_start", batch, index)
        outputs = self.optimization.train(batch, index)
        progress.batch_done(at_end=self.loader.at_end)
        stepped = self.optimization.stepped
        if stepped:
            progress.stepped()
        context.hooks.call("on_train_batch_end", outputs, batch, index)
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
            with self.context.heartbeat.during(Phase.EVALUATING):
                self.validation.run()
            progress.validation_done()

    def end_epoch(self) -> None:
        """Reduce what the epoch logged, step its schedulers, and count it."""
        context, progress = self.context, self.progress
        with context.heartbeat.during(Phase.EVALUATING):
            context.inject_fault("epoch_end")
            with context.logged.ending_epoch():
                context.hooks.call("on_train_epoch_end", of="module")  # what it logs belongs to this epoch
            context.logged.close_epoch()
            context.hooks.call("on_train_epoch_end", of="callbacks")
        self.optimization.step_schedulers("epoch", progress.epoch + 1)
        progress.next_epoch()


class EvaluationLoop:
    """Every batch of every loader once; ranks may have different numbers of them.

    The engine puts no collective inside a step. Where the strategy does, ranks without a batch join in: see `turns`.

    Args:
        context: whose parts are used.
        stage: "validate" (inside a fit its place is part of progress, and snapshots may be taken in it) or "test".
        loaders: one loop over each, in order.
        recorder: of the fit that is validated; None if there is none, or it is not kept.
    """

    def __init__(
        self,
        context: EvaluationContext,
        stage: Literal["validate", "test"],
        loaders: Sequence[ResumableLoader],
        recorder: Recorder | None = None,
    ) -> None:
        self.context, self.stage, self.loaders = context, stage, loaders
        self.prefix = {"validate": "validation", "test": "test"}[stage]
        self.boundaries = Boundaries(context, recorder)
        self.step_end = step_end(context.module, f"{self.prefix}_step")

    def run(self) -> dict[str, float]:
        """Evaluate, from wherever a broken-off evaluation stood; return the reduced values."""
        context, progress, hooks = self.context, self.context.progress, self.context.hooks
        context.logged.begin(self.stage)
        if not progress.validating:
            progress.begin_validation()
            hooks.call(f"on_{self.prefix}_start")
            hooks.call(f"on_{self.prefix}_epoch_start")
        with torch.no_grad(), context.modes.evaluating():
            while progress.val_loader < len(self.loaders):
                context.logged.begin(self.stage, progress.val_loader if len(self.loaders) > 1 else None)
                self.loader(progress.val_loader)
                progress.next_validation_loader()
        context.logged.begin(self.stage)
        hooks.call(f"on_{self.prefix}_epoch_end")
        values = context.logged.close_epoch()
        context.logged.begin("over")
        progress.end_validation()
        hooks.call(f"on_{self.prefix}_end")
        if self.stage == "validate":
            context.reporter.emit("validation", step=progress.step, epoch=progress.epoch, metrics=values)
        context.logged.begin("train")
        return values

    def loader(self, number: int) -> None:
        """Evaluate one loader; a rank that has no batch left waits at the boundaries, or joins in others' steps."""
        context, progress = self.context, self.context.progress
        for batch, own in turns(context, self.loaders[number], progress.val_batch):
            if own:
                self.batch(context.to_device(batch), progress.val_batch, number)
            elif context.strategy.forward_is_collective:
                with without_trace(context):
                    self.step(context.to_device(batch), progress.val_batch, number)
            progress.validation_batch_done()
            if self.stage == "validate":
                self.boundaries.reached()
            else:
                context.strategy.mark_step()

    def batch(self, batch: Any, index: int, number: int) -> None:
        """Evaluate one batch of this rank's own."""
        hooks, extra = self.context.hooks, self._extra(number)
        self.context.logged.begin_batch(batch)
        hooks.call(f"on_{self.prefix}_batch_start", batch, index, *extra)
        outputs = self.step(batch, index, number)
        hooks.call(f"on_{self.prefix}_batch_end", outputs, batch, index, *extra)

    def step(self, batch: Any, index: int, number: int) -> Any:
        """Return what the user's step makes of a batch, with the unwrapped module: DDP's forward shares buffers."""
        context, name = self.context, f"{self.prefix}_step"
        with context.logged.heard(), context.precision.forward():
            outputs = context.strategy.evaluate(context.module, name, batch, index, *self._extra(number))
            return self.step_end(outputs, batch)

    def _extra(self, number: int) -> tuple[int, ...]:
        return (number,) if len(self.loaders) > 1 else ()
