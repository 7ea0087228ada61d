"""`on_nan: skip`. A batch whose loss is not finite on some rank moves nothing on any rank.

The ranks agree before the backward pass, so no gradient is ever poisoned; what the forward pass has changed by then
(buffers, metrics, logged values) is put back. Random numbers that were drawn stay drawn.
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

_IN_A_ROW = 100  # then it is not a batch that is bad, but the weights


class NonFiniteGuard:
    """Finds and leaves out the batches of one fit whose loss is not finite.

    Args:
        context: whose parts are put back.

    Raises:
        UserError: steps that the module takes by itself, or several to a batch, cannot be taken back.
    """

    def __init__(self, context: FitContext) -> None:
        if not context.module.automatic_optimization or len(context.optimizers) > 1:
            raise UserError(
                "on_nan: skip needs one optimizer, stepped by the engine: a batch could be half trained on when its "
                "loss turns out not to be finite. Use on_nan: fail, or one optimizer and automatic_optimization."
            )
        self._context = context

    def rollback_point(self) -> Callable[[], None]:
        """Return what puts back everything a training step changes."""
        context = self._context
        buffers = [
            (buffers_of(owner), name, buffer, None if buffer is None else buffer.clone())
            for owner in context.module.modules()
            for name, buffer in buffers_of(owner).items()
        ]
        logged, metrics = context.metric_logger.rollback_point(), context.metric_logger.metrics.rollback_point()

        def back() -> None:
            with torch.no_grad():
                for owned, name, buffer, before in buffers:
                    if buffer is not None and before is not None:
                        buffer.copy_(before)
                    owned[name] = buffer  # a step may have put another in its place
            logged()
            metrics()

        return back

    def skip_if_nonfinite(self, loss: Tensor, undo: Callable[[], None] | None) -> bool:
        """Return whether `loss` is not finite on some rank, and then `undo` its batch; every rank calls this.

        Raises:
            LossNotFinite: it has not been for 100 batches in a row.
        """
        context, progress = self._context, self._context.progress
        if context.collective.all_agree(bool(torch.isfinite(loss))):
            context.samples.keep()
            return False
        where = f"batch {progress.batch} of epoch {progress.epoch}"
        if context.samples.left_out_in_a_row == _IN_A_ROW:
            raise LossNotFinite(
                f"the loss was not finite for {_IN_A_ROW} batches in a row, up to {where}: leaving batches out does "
                "not help. Snapshots before them are good."
            )
        if undo is not None:
            undo()
        context.samples.skip(progress.epoch, progress.batch)
        if context.world.is_first:
            log.warning("%s is left out: its loss is not finite", where)
        return True

    def close_window(self) -> bool:
        """Return whether the window that a bad batch closes has gradients to step with; exchange them if so."""
        context = self._context
        groups = [group for optimizer in context.optimizers for group in optimizer.param_groups]
        if all(parameter.grad is None for group in groups for parameter in group["params"]):
            return False
        if isinstance(context.strategy, BackwardSync):
            context.strategy.sync_pending_gradients()
        return True
