"""Callbacks that watch one logged value: they keep the best weights, or stop the training."""

import math
import re
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstride.engine.errors import UserError
from midstride.engine.formatting import format_count, format_number
from midstride.engine.modules.callbacks import Callback
from midstride.engine.session.ending import Ending, EndReason

if TYPE_CHECKING:
    from midstride.engine.config.options import TrainerOptions
    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule

__all__ = ["BestCheckpoint", "EarlyStopping", "Monitor"]


class Monitor(Callback):
    """Watches one logged value, and knows its best value so far.

    Args:
        monitor: name of the value.
        mode: "min" or "max": whether the smallest or the largest value is best.
        check_on_train_epoch_end: check the value at the end of each epoch (True) or after each validation (False). By
            default at the end of each epoch if validations run there, so that values of the epoch can be watched, or if
            there are no validations.
    """

    def __init__(self, monitor: str, mode: str = "min", *, check_on_train_epoch_end: bool | None = None) -> None:
        if mode not in ("min", "max"):
            raise UserError(f"{type(self).__name__}: mode should be min or max, not {mode!r}")
        self.monitor = monitor
        self.mode = mode
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.best = math.inf if mode == "min" else -math.inf

    def on_validation_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Call `judge` for a validation of a fit, unless the value is checked at the epoch's end."""
        if trainer.is_fitting and not self.waits_for_epoch_end(trainer.options):
            self.judge(trainer)

    def waits_for_epoch_end(self, options: "TrainerOptions") -> bool:
        """Return whether `judge` is called at the end of each epoch, not after each validation."""
        if self.check_on_train_epoch_end is None:
            interval = options.val_check_interval
            whole = isinstance(interval, float) and interval == 1.0  # 1 is one batch
            return whole and options.check_val_every_n_epoch == 1
        return self.check_on_train_epoch_end

    def judge(self, trainer: "TrainerInterface") -> None:
        """Act on the newest value: after each validation, or at the end of each epoch."""
        raise NotImplementedError(f"{type(self).__name__} needs a method judge(self, trainer)")

    @property
    def watched(self) -> dict[str, str]:
        """Monitored value and mode. A best value is valid only for these."""
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
                f"Log it in training_step or validation_step: self.log({self.monitor!r}, value)."
            )
        return float(values[self.monitor])


class BestCheckpoint(Monitor):
    """Keeps the best weights by validation, or by epoch without one, in the run's `best` folder.

    With `k`, the run's folder `checkpoints` has files of the k best, for `load_from_checkpoint` and `ckpt_path=`.

    Args:
        monitor: name of a logged value, such as "val/loss".
        mode: "min" or "max".
        k: number of best weights to keep.
        filename: pattern of their names, such as "{epoch}-{val/loss:.2f}"; each name has the step as well.
        check_on_train_epoch_end: as that of `Monitor`.
    """

    def __init__(
        self,
        monitor: str,
        mode: str = "min",
        *,
        k: int = 1,
        filename: str | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        super().__init__(monitor, mode, check_on_train_epoch_end=check_on_train_epoch_end)
        if type(k) is not int or k < 1:
            raise UserError(f"BestCheckpoint: k should be a whole number from 1 on, not {k!r}")
        if filename is not None and k == 1:
            raise UserError("BestCheckpoint: filename names the k best weights: set k, or leave it out")
        self.k, self.filename = k, filename or "{epoch}"
        self.best_step = -1
        #: value, step and name of each of the k best, the best first
        self.kept: list[tuple[float, int, str]] = []

    def judge(self, trainer: "TrainerInterface") -> None:
        """Keep the weights if the monitored value is better than any before, or among the k best."""
        value = self.value(trainer)
        if self.k > 1 and trainer.run_url is not None and not math.isnan(value):
            self._keep(trainer, trainer.run_url, value)
        if self.is_better(value):
            self.best, self.best_step = value, trainer.progress.step
            trainer.save_weights("best")

    def _keep(self, trainer: "TrainerInterface", run: str, value: float) -> None:
        """Write the weights if they are among the k best, and remove the worst one."""
        if "://" in run:
            raise UserError(f"BestCheckpoint(k={self.k}) writes files, and {run} is no folder: leave k out")
        step = trainer.progress.step
        newest = (value, step, self._name(trainer))
        rows = [*(row for row in self.kept if row[2] != newest[2]), newest]
        rows.sort(key=lambda row: row[0], reverse=self.mode == "max")
        self.kept, dropped = rows[: self.k], rows[self.k :]
        if newest in self.kept:
            trainer.save_checkpoint(self.path_of(run, newest[2]))
        if trainer.is_global_zero:
            for _, _, name in dropped:
                Path(self.path_of(run, name)).unlink(missing_ok=True)

    def _name(self, trainer: "TrainerInterface") -> str:
        values = {**trainer.metric_logger.values, "epoch": trainer.current_epoch, "step": trainer.progress.step}

        def filled(found: re.Match[str]) -> str:
            if (name := found[1]) not in values:
                raise UserError(
                    f"BestCheckpoint: filename {self.filename!r} has {name!r}, which was not logged: log "
                    f"it, or leave it out"
                )
            return f"{name}={format(values[name], found[2] or '')}"

        pattern = self.filename if "{step" in self.filename else f"{self.filename}-{{step}}"
        return re.sub(r"\{([^}:]+):?([^}]*)\}", filled, pattern).replace("/", "_")

    def path_of(self, run: str, name: str) -> str:
        """Return the path of the file called `name`."""
        return f"{run.rstrip('/')}/checkpoints/{name}.ckpt"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, the k best, and the monitored value and mode."""
        kept = {"kept": [[*row] for row in self.kept]} if self.k > 1 else {}
        return {"best": self.best, "best_step": self.best_step, **kept, **self.watched}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the best value, its step, and the k best."""
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        self.kept = [(value, step, name) for value, step, name in state_dict.get("kept", ())]


class EarlyStopping(Monitor):
    """Stops training when a value has not improved for a while.

    Args:
        monitor: name of a logged value.
        patience: validations, or epochs of a fit without any, without an improvement after which training stops.
        mode: "min" or "max".
        min_delta: smallest change that counts as an improvement.
        check_finite: stop at once when the value is not finite.
        strict: whether a missing value is an error; otherwise it is not counted.
        stopping_threshold: stop at once when the value is better than this.
        divergence_threshold: stop at once when the value is worse than this.
        check_on_train_epoch_end: as that of `Monitor`.

    Raises:
        UserError: `patience` is not a whole number from 0 on, or `min_delta` not a finite one.
    """

    def __init__(
        self,
        monitor: str,
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
        check_finite: bool = False,
        *,
        strict: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        super().__init__(monitor, mode, check_on_train_epoch_end=check_on_train_epoch_end)
        if not _is_number(patience, Integral) or patience < 0:
            raise UserError(f"EarlyStopping: patience should be a whole number from 0 on, not {patience!r}")
        if not _is_number(min_delta, Real):
            raise UserError(f"EarlyStopping: min_delta should be a finite number, not {min_delta!r}")
        self.patience, self.min_delta, self.check_finite = patience, min_delta, check_finite
        self.strict = strict
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.wait_count = 0
        #: the epoch of the best value, from 0 on
        self.best_epoch = 0
        #: the epoch in which it stopped the training, from 0 on; 0 if it did not
        self.stopped_epoch = 0

    def judge(self, trainer: "TrainerInterface") -> None:
        """Count validations, or epochs, without an improvement."""
        if not self.strict and self.monitor not in trainer.metric_logger.values:
            return
        if why := self._why_over(trainer):
            self.stopped_epoch = trainer.progress.epoch
            trainer.stop(Ending(EndReason.EARLY_STOPPING, f"early stopping: {self.monitor} {why}"))

    def _why_over(self, trainer: "TrainerInterface") -> str:
        """Count the newest value; return why the training stops for it, or ""."""
        value = self.value(trainer)
        if self.check_finite and not math.isfinite(value):
            return f"is {value}"
        if past := self._past_threshold(value):
            return f"is {format_number(value)}, past {past}"
        if self.is_better(value, self.min_delta):
            self.best, self.best_epoch, self.wait_count = value, trainer.progress.epoch, 0
            return ""
        self.wait_count += 1
        if self.wait_count < self.patience:
            return ""
        checks = format_count(self.wait_count, "validation" if trainer.num_val_batches else "epoch")
        by = f" by {format_number(self.min_delta)}" if self.min_delta else ""
        best = f", best {format_number(self.best)} at epoch {self.best_epoch}" if math.isfinite(self.best) else ""
        return f"has not improved{by} for {checks}{best}"

    def _past_threshold(self, value: float) -> str:
        """Return the threshold that `value` is past, or ""."""
        sign = 1 if self.mode == "max" else -1
        good, bad = self.stopping_threshold, self.divergence_threshold
        if good is not None and sign * value > sign * good:
            return f"stopping_threshold {format_number(good)}"
        if bad is not None and sign * value < sign * bad:
            return f"divergence_threshold {format_number(bad)}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return best value, validations since, epoch of the stop, and monitored value and mode."""
        return {
            "best": self.best,
            "wait_count": self.wait_count,
            "best_epoch": self.best_epoch,
            "stopped_epoch": self.stopped_epoch,
            **self.watched,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the best value, the count and the epoch of the stop."""
        self.best, self.wait_count = state_dict["best"], state_dict["wait_count"]
        self.best_epoch, self.stopped_epoch = state_dict["best_epoch"], state_dict["stopped_epoch"]


def _is_number(value: Any, kind: type[Any]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
