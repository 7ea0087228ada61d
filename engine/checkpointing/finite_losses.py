"""Checks that losses are finite, before anything that depends on them is written."""

import math

import torch
from torch import Tensor

from midstride.engine.errors import LossNotFinite
from midstride.engine.metrics.values import copied, is_on_host
from midstride.engine.modules.progress import Progress

__all__ = ["FiniteLosses"]

#: largest number of losses that are kept on their device before they are checked together
_MAX_PENDING = 50


class FiniteLosses:
    """Checks the losses of a fit: immediately on the CPU, on a GPU before something is written.

    To check each loss on a GPU would synchronize with it in every step.

    Args:
        progress: progress of the fit.
        rank: rank in error messages.
        needed: whether losses are checked; not with float16, which can overflow, and then the scaler skips the step.
    """

    def __init__(self, progress: Progress, rank: int, *, needed: bool) -> None:
        self._progress, self._rank, self.needed = progress, rank, needed
        self._pending: list[tuple[Tensor, tuple[int, int, int]]] = []

    def check(self, loss: Tensor) -> None:
        """Check the loss of the current batch, now or in a later `verify`.

        Raises:
            LossNotFinite: a loss is not finite; the message has its position.
        """
        if not self.needed:
            return
        if is_on_host(loss):
            if not math.isfinite(loss.item()):
                raise self._error(loss.item(), self._position())
            return
        self._pending.append((copied(loss), self._position()))
        if len(self._pending) >= _MAX_PENDING:
            self.verify()

    def verify(self) -> None:
        """Check all pending losses, before a run is written to, and when the host waits anyway.

        Raises:
            LossNotFinite: a loss is not finite; the message has the position of the first.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        for value, (_, position) in zip(torch.stack([loss for loss, _ in pending]).tolist(), pending, strict=True):
            if not math.isfinite(value):
                raise self._error(value, position)

    def _position(self) -> tuple[int, int, int]:
        return self._progress.epoch, self._progress.batch, self._progress.step + 1

    def _error(self, value: float, position: tuple[int, int, int]) -> LossNotFinite:
        epoch, batch, step = position
        return LossNotFinite(
            f"the loss is {value} (epoch {epoch}, batch {batch}, step {step}, rank {self._rank}). Nothing was written "
            "since; earlier snapshots are intact. Repeating the command fails again: lower the learning rate, clip "
            "gradients (gradient_clip_val), or leave such batches out (on_nan: skip)."
        )
