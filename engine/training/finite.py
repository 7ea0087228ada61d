"""Losses that have to be finite: refused before anything is written after them."""

import math

import torch
from torch import Tensor

from midstride.engine.errors import LossNotFinite
from midstride.engine.metrics.values import copied, is_on_host
from midstride.engine.modules.progress import Progress

__all__ = ["FiniteLosses"]

#: losses that may wait on their device: then the host looks at all of them at once
_MOST = 50


class FiniteLosses:
    """Looks at the losses of a fit: on the host at once, on a GPU when something is about to be kept.

    To look at each there would be to wait for the device in every step.

    Args:
        progress: of the fit.
        rank: for the message.
        needed: whether losses have to be finite: one of float16 may overflow, and the scaler then skips the step.
    """

    def __init__(self, progress: Progress, rank: int, *, needed: bool) -> None:
        self._progress, self._rank, self.needed = progress, rank, needed
        self._waiting: list[tuple[Tensor, tuple[int, int, int]]] = []

    def check(self, loss: Tensor) -> None:
        """Refuse to go on from a loss that is not finite, now or in `verify`; it is of the batch in hand.

        Raises:
            LossNotFinite: saying where.
        """
        if not self.needed:
            return
        if is_on_host(loss):
            if not math.isfinite(loss.item()):
                raise self._error(loss.item(), self._position())
            return
        self._waiting.append((copied(loss), self._position()))
        if len(self._waiting) >= _MOST:
            self.verify()

    def verify(self) -> None:
        """Look at every loss that waits; called before anything of a run is kept, and where the host waits anyway.

        Raises:
            LossNotFinite: saying where the first one was.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        for value, (_, position) in zip(torch.stack([loss for loss, _ in waiting]).tolist(), waiting, strict=True):
            if not math.isfinite(value):
                raise self._error(value, position)

    def _position(self) -> tuple[int, int, int]:
        return self._progress.epoch, self._progress.batch, self._progress.step + 1

    def _error(self, value: float, position: tuple[int, int, int]) -> LossNotFinite:
        epoch, batch, step = position
        return LossNotFinite(
            f"the loss is {value} at epoch {epoch}, batch {batch}, step {step}"
            f" on rank {self._rank}. Nothing was written after it: earlier snapshots are good."
        )
