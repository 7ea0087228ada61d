"""Hooks of a module at fixed points of a fit, a validation, a test and a prediction."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Hooks of a module; each does nothing unless it is overridden."""

    def on_fit_start(self) -> None:
        """At the start of `fit`, in every attempt, before the state of a snapshot is restored."""

    def on_fit_end(self) -> None:
        """At the end of `fit`, once everything is written."""

    def on_train_start(self) -> None:
        """After `on_fit_start`; the state of a snapshot is restored after it."""

    def on_train_end(self) -> None:
        """Called after the last epoch, in each attempt that reaches it.

        Its changes are in `last`, not in snapshots.
        """

    def on_train_epoch_start(self) -> None:
        """Before the first batch of an epoch; not again if a run resumes within it."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch's last batch, or the batch that stops training, and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before a training step; `batch` is on the device."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training step, and after the optimizer step if one follows."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before each backward pass."""

    def on_after_backward(self) -> None:
        """After the backward pass, before gradients are clipped."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before the optimizer step, when all gradients are computed and not clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """After the optimizer's step, before gradients are set to zero."""

    def on_validation_start(self) -> None:
        """At the start of a validation."""

    def on_validation_end(self) -> None:
        """At the end of a validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self) -> None:
        """After the last batch of a validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each batch of a validation."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each batch of a validation."""

    def on_test_start(self) -> None:
        """At the start of a test."""

    def on_test_end(self) -> None:
        """At the end of a test."""

    def on_test_epoch_start(self) -> None:
        """Before the first batch of a test."""

    def on_test_epoch_end(self) -> None:
        """After the last batch of a test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each batch of a test."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each batch of a test."""

    def on_predict_start(self) -> None:
        """At the start of a prediction."""

    def on_predict_end(self) -> None:
        """At the end of a prediction."""

    def on_predict_epoch_start(self) -> None:
        """Before the first batch of a prediction."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch of a prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each batch of a prediction."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each batch of a prediction."""

    def on_exception(self, exception: BaseException) -> None:
        """Called as a fit or an evaluation fails or is interrupted.

        Snapshots have none of its changes.
        """

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add further state of this module to `checkpoint`: numbers, text, tensors, nests of them."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the entries that `on_save_checkpoint` added."""
