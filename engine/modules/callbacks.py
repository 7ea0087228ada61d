"""Callbacks: objects that are called at the hooks of a fit, beside the module, with state of their own."""

import copy
import math
import weakref
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.metrics.values import number

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule

__all__ = [
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "Monitor",
    "first_state",
    "keep_first_state",
]


class Callback:
    """Base of callbacks; a hook that is not written costs nothing.

    A callback that depends on earlier calls overrides `state_dict` and `load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides what this callback does next."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Become the callback that gave `state_dict`."""

    def trainer_view(self, trainer: "TrainerInterface") -> Any:
        """Return the object that the hooks get as `trainer`; adapters, as for Lightning's callbacks, return a view."""
        return trainer

    def on_fit_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of `fit`, in every attempt, before the state of a snapshot is given back."""

    def on_fit_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of `fit`, once everything is written."""

    def on_train_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After `on_fit_start`; the state of a snapshot is given back after it."""

    def on_train_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last epoch."""

    def on_train_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of an epoch; not again where a run resumes within it."""

    def on_train_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of an epoch, and the validation that follows it."""

    def on_train_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int
    ) -> None:
        """Before a training step; `batch` is on the device."""

    def on_train_batch_end(
        self, trainer: "TrainerInterface", module: "TrainingModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a training step, and the optimizer's step where the batch ends an accumulation."""

    def on_before_backward(self, trainer: "TrainerInterface", module: "TrainingModule", loss: "Tensor") -> None:
        """Before each backward pass."""

    def on_after_backward(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the backward pass, before gradients are clipped."""

    def on_before_optimizer_step(
        self, trainer: "TrainerInterface", module: "TrainingModule", optimizer: "Optimizer"
    ) -> None:
        """Before the optimizer's step, with all gradients there and clipped."""

    def on_before_zero_grad(
        self, trainer: "TrainerInterface", module: "TrainingModule", optimizer: "Optimizer"
    ) -> None:
        """After the optimizer's step, before gradients are set to zero."""

    def on_validation_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of a validation."""

    def on_validation_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of a validation."""

    def on_validation_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of a validation."""

    def on_validation_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch of a validation."""

    def on_validation_batch_end(
        self,
        trainer: "TrainerInterface",
        module: "TrainingModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of a validation."""

    def on_test_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of a test."""

    def on_test_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of a test."""

    def on_test_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch of a test."""

    def on_test_batch_end(
        self,
        trainer: "TrainerInterface",
        module: "TrainingModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of a test."""

    def on_test_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of a test."""

    def on_test_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of a test."""

    def on_predict_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the start of a prediction."""

    def on_predict_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """At the end of a prediction."""

    def on_predict_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Before the first batch of a prediction."""

    def on_predict_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """After the last batch of a prediction."""

    def on_predict_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch of a prediction."""

    def on_predict_batch_end(
        self,
        trainer: "TrainerInterface",
        module: "TrainingModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of a prediction."""

    def on_save_checkpoint(
        self, trainer: "TrainerInterface", module: "TrainingModule", checkpoint: dict[str, Any]
    ) -> None:
        """Put into `checkpoint`, which the module's hook gets too, what is not in `state_dict`."""

    def on_load_checkpoint(
        self, trainer: "TrainerInterface", module: "TrainingModule", checkpoint: dict[str, Any]
    ) -> None:
        """Take back what `on_save_checkpoint` put in."""


#: id of a callback that was in a fit -> a reference to it, and its state before its first fit
_FIRST_STATES: dict[int, tuple["weakref.ref[Callback]", dict[str, Any]]] = {}


def first_state(callback: Callback) -> dict[str, Any]:
    """Return the state of `callback` before its first fit, of this or another Trainer; without one, its state now."""
    known = _FIRST_STATES.get(id(callback))
    return known[1] if known else copy.deepcopy(callback.state_dict())


def keep_first_state(callback: Callback, state: dict[str, Any]) -> None:
    """Record `state` as the state of `callback` before its first fit, for as long as `callback` exists."""
    key = id(callback)
    if key not in _FIRST_STATES:
        _FIRST_STATES[key] = weakref.ref(callback, lambda _: _FIRST_STATES.pop(key, None)), state


class Monitor(Callback):
    """Watches one logged value for its best.

    Args:
        monitor: name of the value.
        mode: "min" or "max": which one is best.
    """

    def __init__(self, monitor: str, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise UserError(f"{type(self).__name__}: no mode {mode!r}; there are: min, max")
        self.monitor = monitor
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf

    def on_validation_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Call `judge`, if the validation is part of a fit."""
        if trainer.is_fitting:
            self.judge(trainer)

    def judge(self, trainer: "TrainerInterface") -> None:
        """Act on the newest value: after each validation, or at the end of each epoch of a fit without validation."""
        raise NotImplementedError("a callback that watches a value says what comes of it: write judge")

    @property
    def watched(self) -> dict[str, str]:
        """The monitored value and the mode, as part of the state: a best value is of use only for the same two."""
        return {"monitor": self.monitor, "mode": self.mode}

    def is_better(self, value: float, margin: float = 0.0) -> bool:
        """Return whether `value` beats the best so far by more than `margin`; NaN never does."""
        return value < self.best - margin if self.mode == "min" else value > self.best + margin

    def value(self, trainer: "TrainerInterface") -> float:
        """Return the newest monitored value, which is the same on every rank.

        Raises:
            UserError: it was not logged.
        """
        values = trainer.metric_logger.values
        if self.monitor not in values:
            known = ", ".join(sorted(values)) or "nothing"
            raise UserError(
                f"{type(self).__name__} monitors {self.monitor!r}, which was not logged; logged so far: {known}. "
                f"Log it in validation_step: self.log({self.monitor!r}, value)."
            )
        return float(values[self.monitor])


class BestCheckpoint(Monitor):
    """Keeps the weights of the best validation in the run's `best` folder; without a validation, of the best epoch.

    Args:
        monitor: name of a logged value, such as "val/loss".
        mode: "min" or "max".
    """

    def __init__(self, monitor: str, mode: str = "min") -> None:
        super().__init__(monitor, mode)
        self.best_step = -1

    def judge(self, trainer: "TrainerInterface") -> None:
        """Keep the weights if the monitored value is better than any before."""
        value = self.value(trainer)
        if self.is_better(value):
            self.best, self.best_step = value, trainer.progress.step
            trainer.save_weights("best")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and what is monitored."""
        return {"best": self.best, "best_step": self.best_step, **self.watched}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the best value and its step."""
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]


class EarlyStopping(Monitor):
    """Stops training when a value has not improved for a while.

    Args:
        monitor: name of a logged value.
        patience: validations, or epochs of a fit without any, without an improvement after which training stops.
        mode: "min" or "max".
        min_delta: smallest change that counts as an improvement.
        check_finite: stop at once when the value is not finite.

    Raises:
        UserError: `patience` is not a whole number from 0 on, or `min_delta` not a finite one.
    """

    def __init__(
        self, monitor: str, patience: int = 3, mode: str = "min", min_delta: float = 0.0, check_finite: bool = False
    ) -> None:
        super().__init__(monitor, mode)
        if not _is_number(patience, Integral) or patience < 0:
            raise UserError(f"EarlyStopping: patience should be a whole number from 0 on, not {patience!r}")
        if not _is_number(min_delta, Real):
            raise UserError(f"EarlyStopping: min_delta should be a finite number, not {min_delta!r}")
        self.patience, self.min_delta, self.check_finite = patience, min_delta, check_finite
        self.wait_count = 0

    def judge(self, trainer: "TrainerInterface") -> None:
        """Count validations, or epochs, without an improvement."""
        value = self.value(trainer)
        is_out = self.check_finite and not math.isfinite(value)
        if not is_out and self.is_better(value, self.min_delta):
            self.best, self.wait_count = value, 0
            return
        self.wait_count = self.patience if is_out else self.wait_count + 1
        if self.wait_count >= self.patience:
            trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the validations since, and what is monitored."""
        return {"best": self.best, "wait_count": self.wait_count, **self.watched}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the best value and the count."""
        self.best, self.wait_count = state_dict["best"], state_dict["wait_count"]


def _is_number(value: Any, kind: type[Any]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


class LearningRateMonitor(Callback):
    """Logs every optimizer's learning rate at every step, as "lr", or "lr/0", "lr/1" and so on."""

    def on_train_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int
    ) -> None:
        """Log the rate that this batch's step will use."""
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for index, rate in enumerate(rates):
            name = "lr" if len(rates) == 1 else f"lr/{index}"
            trainer.metric_logger.rows.set_next(name, number(name, rate) if isinstance(rate, Tensor) else float(rate))
