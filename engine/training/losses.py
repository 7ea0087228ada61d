"""Finds the loss in outputs of `training_step`; skips missing and non-finite losses."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from midstride.engine.errors import LossNotFinite, NoLoss, UserError
from midstride.engine.modules.torch_internals import buffers_of
from midstride.engine.strategies.mixins import BackwardSync
from midstride.engine.strategies.step import loss_in
from midstride.engine.training.context import FitContext

__all__ = ["Losses", "NonFiniteGuard"]

log = logging.getLogger(__name__)

#: batches at the beginning of an epoch, at least one of which must have a loss
FIRST_BATCHES = 100
#: after the first epoch, all batches of a shorter epoch may be skipped
FEW_BATCHES = 10
#: skipped batches in a row after which the fit fails, since the weights must be the cause
_MAX_SKIPPED = 100


class Losses:
    """Reads the losses of one fit.

    Args:
        context: context of the fit.
    """

    def __init__(self, context: FitContext) -> None:
        self._context, self._loader = context, context.loaders.training
        #: number of ranks, or with lanes of lanes: each needs a loss for every batch
        self._ranks = context.world.size if context.lanes is None else context.lanes.count
        self._step = f"{type(context.module).__name__}.training_step"
        self._has_warned = False

    def read(self, outputs: Any) -> Tensor | None:
        """Return the loss in the outputs of a training step; None to skip the batch.

        Raises:
            UserError: the loss is not a tensor with one element, or does not require gradients.
            NoLoss: it is missing on one of several ranks or lanes, where no batch can be skipped.
        """
        loss = outputs if isinstance(outputs, Tensor) else loss_in(outputs)
        if loss is None:
            self._missing(outputs)
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f'{self._step} returned {what}: return a tensor of one number, or a dict with it as "loss".'
            )
        if not loss.requires_grad:
            raise UserError(
                f"{self._step} returned a loss without a gradient: it depends on no trained parameter, or detach(), "
                "item(), torch.tensor(...) or torch.no_grad() cut it off. Return the loss as computed."
            )
        return loss

    def record_missing(self, index: int, *, last: bool) -> None:
        """Count batch `index` of the epoch, which had no loss; `last` if the fit ends with it.

        Raises:
            NoLoss: no batch of the epoch had a loss, and there were enough of them.
        """
        progress = self._context.progress
        # With several ranks, `read` has refused it; in a pipeline, only the last stage has a loss.
        if self._ranks > 1 or progress.skipped < index:
            return
        progress.batch_skipped()
        over = last or self._loader.at_end
        enough = FEW_BATCHES if progress.epoch else 1
        if progress.skipped >= FIRST_BATCHES or (over and progress.skipped >= enough):
            which = f"any of the {progress.skipped} batches" if index else "the one batch"
            raise NoLoss(
                f"{self._step} returned no loss for {which} of epoch {progress.epoch}: nothing is trained. "
                "Is a `return loss` missing?"
            )

    def _missing(self, outputs: Any) -> None:
        what = f'a dict without "loss" ({", ".join(map(str, outputs)) or "empty"})' if outputs is not None else "None"
        if (size := self._ranks) > 1:
            raise NoLoss(
                f"{self._step} returned {what}, which is no loss: one of {size} processes cannot skip a batch. Is a "
                "`return loss` missing? To skip a batch, return a loss of 0.0 that depends on the parameters."
            )
        if not self._has_warned:
            self._has_warned = True
            progress = self._context.progress
            log.warning(
                "%s returned %s (epoch %d, batch %d): the batch is skipped. If this is not intended, a `return loss` "
                "is missing",
                self._step,
                what,
                progress.epoch,
                progress.batch,
            )


class NonFiniteGuard:
    """Leaves out the batches of one fit whose loss is not finite on some rank: `on_nan: skip`.

    The ranks agree before the backward pass, so gradients stay finite. What the forward pass has changed (buffers,
    metrics, logged values) is restored; random number generators are not.

    Args:
        context: context of the fit.

    Raises:
        UserError: there are several optimizers, or optimization is manual, so that a step could not be reverted.
    """

    def __init__(self, context: FitContext) -> None:
        if not context.module.automatic_optimization or len(context.optimizers) > 1:
            raise UserError(
                "on_nan: skip needs one optimizer and automatic_optimization: otherwise a batch could be half trained "
                "on before its loss is known. Use on_nan: fail, or one optimizer and automatic_optimization."
            )
        self._context = context

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that restores the state that forward passes change from now on."""
        context = self._context
        buffers = [
            (buffers_of(owner), name, buffer, None if buffer is None else buffer.clone())
            for owner in context.module.modules()
            for name, buffer in buffers_of(owner).items()
        ]
        logged, metrics = context.metric_logger.rollback_point(), context.metric_logger.metrics.rollback_point()

        def rollback() -> None:
            with torch.no_grad():
                for owned, name, buffer, before in buffers:
                    if buffer is not None and before is not None:
                        buffer.copy_(before)
                    owned[name] = buffer  # a step may have replaced it
            logged()
            metrics()

        return rollback

    def skip_if_nonfinite(self, loss: Tensor, undo: Callable[[], None] | None) -> bool:
        """Return whether `loss` is not finite on some rank; if so, `undo` its batch.

        Every rank calls this.

        Raises:
            LossNotFinite: 100 batches in a row were skipped.
        """
        context, progress = self._context, self._context.progress
        if context.collective.all_agree(bool(torch.isfinite(loss))):
            context.samples.keep()
            return False
        where = f"batch {progress.batch} of epoch {progress.epoch}"
        if context.samples.left_out_in_a_row == _MAX_SKIPPED:
            raise LossNotFinite(
                f"the loss was not finite for {_MAX_SKIPPED} batches in a row, up to {where}: skipping batches does "
                "not help. Earlier snapshots are intact."
            )
        if undo is not None:
            undo()
        context.samples.skip(progress.epoch, progress.batch)
        if context.world.is_first:
            log.warning("%s is skipped: its loss is not finite", where)
        return True

    def close_window(self) -> bool:
        """Return whether a window whose last batch was skipped has gradients; if so, exchange them."""
        context = self._context
        groups = [group for optimizer in context.optimizers for group in optimizer.param_groups]
        if all(parameter.grad is None for group in groups for parameter in group["params"]):
            return False
        if isinstance(context.strategy, BackwardSync):
            context.strategy.sync_pending_gradients()
        return True
