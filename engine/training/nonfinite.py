"""`on_nan: skip`: leaves a batch out on all ranks if its loss is not finite on one of them.

The ranks agree before the backward pass, so gradients stay finite. What the forward pass has changed (buffers, metrics,
logged values) is restored; random number generators are not.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from midstride.engine.errors import LossNotFinite, UserError
from midstride.engine.modules.torch_internals import buffers_of
from midstride.engine.strategies.mixins import BackwardSync
from midstride.engine.training.context import FitContext

__all__ = ["NonFiniteGuard"]

log = logging.getLogger(__name__)

#: skipped batches in a row after which the fit fails, since the weights must be the cause
_MAX_SKIPPED = 100


class NonFiniteGuard:
    """Leaves out the batches of one fit whose loss is not finite.

    Args:
        context: context of the fit.

    Raises:
        UserError: there are several optimizers, or optimization is manual, so that a step could not be reverted.
    """

    def __init__(self, context: FitContext) -> None:
        if not context.module.automatic_optimization or len(context.optimizers) > 1:
            raise UserError(
                "on_nan: skip needs one optimizer, stepped by the engine: a batch could be half trained on when its "
                "loss turns out not to be finite. Use on_nan: fail, or one optimizer and automatic_optimization."
            )
        self._context = context

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that restores what a forward pass changes from now on."""
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
        """Return whether `loss` is not finite on some rank; if so, `undo` its batch. Every rank calls this.

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
                f"the loss was not finite for {_MAX_SKIPPED} batches in a row, up to {where}: leaving batches out does "
                "not help. Snapshots before them are good."
            )
        if undo is not None:
            undo()
        context.samples.skip(progress.epoch, progress.batch)
        if context.world.is_first:
            log.warning("%s is left out: its loss is not finite", where)
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
