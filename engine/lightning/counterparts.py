"""The counterparts of Lightning's own callbacks, and the attributes of those after a run."""

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from midstride.engine.lightning.checkpoint import exported_path
from midstride.engine.lightning.lightning_internals import rates_of
from midstride.engine.modules.averaging import WeightAveraging
from midstride.engine.modules.callbacks import Callback, LearningRateMonitor
from midstride.engine.modules.monitors import BestCheckpoint, EarlyStopping
from midstride.engine.modules.schedules import GradientAccumulationScheduler
from midstride.engine.modules.timers import Timer

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule

__all__ = ["COUNTERPARTS", "MAY_OVERRIDE", "LightningRates", "lightning_callbacks", "update_lightning_callbacks"]

log = logging.getLogger(__name__)


def _early_stopping(given: Any, faults: list[str]) -> Callback:
    return EarlyStopping(
        given.monitor,
        given.patience,
        given.mode,
        abs(given.min_delta),
        given.check_finite,
        strict=given.strict,
        stopping_threshold=given.stopping_threshold,
        divergence_threshold=given.divergence_threshold,
        check_on_train_epoch_end=vars(given)["_check_on_train_epoch_end"],
    )


def _model_checkpoint(given: Any, faults: list[str]) -> Callback | None:
    """Return a callback that saves the best weights; None without a monitor."""
    if given.dirpath or (given.filename and given.save_top_k <= 1):
        where = f"dirpath={str(given.dirpath)!r}" if given.dirpath else f"filename={given.filename!r}"
        log.warning("ModelCheckpoint(%s) is not used: weights are in the folder of the run, see best_model_path", where)
    if given.monitor is None:
        return None
    if given.save_top_k < 0:
        log.warning("ModelCheckpoint(save_top_k=%s): only the best weights are kept, in best/", given.save_top_k)
    at_epoch_end = vars(given)["_save_on_train_epoch_end"]
    several: dict[str, Any] = {"k": given.save_top_k, "filename": given.filename} if given.save_top_k > 1 else {}
    return BestCheckpoint(given.monitor, given.mode, check_on_train_epoch_end=at_epoch_end, **several)


_READINGS = ("lrs", "last_momentum_values", "last_weight_decay_values")


class LightningRates(LearningRateMonitor):
    """Logs rates, momentum and weight decay under the names of Lightning's monitor: "lr-Adam".

    Args:
        given: a LearningRateMonitor of Lightning's.
    """

    def __init__(self, given: Any) -> None:
        self._reader = copy.copy(given)
        vars(self._reader).update({name: {} for name in _READINGS})

    @property
    def readings(self) -> dict[str, Any]:
        """The attributes of Lightning's monitor, with the newest values."""
        return {name: dict(vars(self._reader)[name]) for name in _READINGS}

    def on_train_batch_start(
        self, trainer: "TrainerInterface", module: "TrainingModule", batch: Any, batch_idx: int
    ) -> None:
        """Log the values that Lightning's monitor reads, in the row of this batch's step."""
        asked = self._reader.logging_interval
        is_due = {"epoch": asked != "step" and batch_idx == 0, "step": asked != "epoch"}
        for interval in (interval for interval in is_due if is_due[interval]):
            for name, value in rates_of(self._reader, trainer, "any" if asked else interval).items():
                trainer.metric_logger.rows.set_next(name, float(value))
        for rates in self._reader.lrs.values():
            del rates[:-1]  # it would keep those of all steps, in each snapshot


def _learning_rate_monitor(given: Any, faults: list[str]) -> Callback:
    return LightningRates(given)


def _lambda_callback(given: Any, faults: list[str]) -> Any:
    """Return a callback of a class derived from Lightning's, whose methods call the functions."""
    functions, base = dict(vars(given)), type(given).__mro__[1]
    written_in = next((function.__module__ for function in functions.values() if hasattr(function, "__module__")), "")
    methods = {name: _function_call(name) for name in functions}
    callback: Any = type("LambdaCallback", (base,), {**methods, "__module__": written_in})()
    vars(callback).update(functions=functions)
    return callback


def _function_call(name: str) -> Callable[..., Any]:
    return lambda self, *given: self.functions[name](*given)


def _timer(given: Any, faults: list[str]) -> Callback | None:
    """Return a timer that ends the training; None if the given one only measures."""
    own = vars(given)
    interval = getattr(own["_interval"], "value", own["_interval"])  # a text, or an enum of Lightning's
    return None if own["_duration"] is None else Timer(own["_duration"], interval)


def _accumulation(given: Any, faults: list[str]) -> Callback:
    return GradientAccumulationScheduler(given.scheduling)


class LightningAveraging(WeightAveraging):
    """Averages when Lightning's callback says so.

    Args:
        given: a WeightAveraging of Lightning's, or an object of a derived class that overrides `should_update`.
    """

    def __init__(self, given: Any) -> None:
        own = vars(given)
        super().__init__(use_buffers=own["_use_buffers"], device=own["_device"], **own["_kwargs"])
        self._given = given

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return the result of the given callback."""
        return bool(self._given.should_update(step_idx=step_idx, epoch_idx=epoch_idx))


def _weight_averaging(given: Any, faults: list[str]) -> Callback:
    return LightningAveraging(given)


#: class of Lightning's -> function from such a callback, and a list to append faults to, to its counterpart or None
COUNTERPARTS: dict[str, Callable[[Any, list[str]], Any]] = {
    "EMAWeightAveraging": _weight_averaging,
    "EarlyStopping": _early_stopping,
    "GradientAccumulationScheduler": _accumulation,
    "LambdaCallback": _lambda_callback,
    "LearningRateMonitor": _learning_rate_monitor,
    "ModelCheckpoint": _model_checkpoint,
    "Timer": _timer,
    "WeightAveraging": _weight_averaging,
}
#: class of Lightning's -> methods that a derived class may override
MAY_OVERRIDE = dict.fromkeys(("EMAWeightAveraging", "WeightAveraging"), frozenset({"should_update"}))


def lightning_callbacks(trainer: "TrainerInterface", kind: str) -> list[Any]:
    """Return the given callbacks of Lightning's class `kind`, with current attributes."""
    update_lightning_callbacks(trainer)
    return [given for given, _ in trainer.callback_pairs if type(given).__name__ == kind]


def update_lightning_callbacks(trainer: "TrainerInterface") -> None:
    """Copy attributes such as `best_model_path` from counterparts to Lightning's callbacks."""
    for given, counterpart in trainer.callback_pairs:
        if isinstance(counterpart, Timer) and given is not None:
            vars(given)["_offset"] = counterpart.elapsed
        elif isinstance(counterpart, LightningRates):
            vars(given).update(counterpart.readings)
        elif isinstance(counterpart, EarlyStopping):
            vars(given).update(_early_stopping_attributes(given, counterpart, trainer.progress.why))
        elif type(given).__name__ == "ModelCheckpoint" and trainer.run_url is not None:
            vars(given).update(_model_checkpoint_attributes(trainer.run_url.rstrip("/"), counterpart))


#: words in the reason of our stop -> name of Lightning's reason; the last has none of its own
_STOPPING_REASONS = {
    "": "NOT_STOPPED",
    "has not improved": "PATIENCE_EXHAUSTED",
    "past stopping_threshold": "STOPPING_THRESHOLD",
    "past divergence_threshold": "DIVERGENCE_THRESHOLD",
    "is ": "NON_FINITE_METRIC",
}


def _early_stopping_attributes(given: Any, stopping: EarlyStopping, ended: str) -> dict[str, Any]:
    """Return what the given callback says of a fit that ended for the reason `ended`."""
    counts = {"wait_count": stopping.wait_count, "stopped_epoch": stopping.stopped_epoch}
    found = {"best_score": torch.tensor(stopping.best), **counts}
    reason: Any = getattr(given, "stopping_reason", None)
    if reason is None:  # of Lightning before 2.6
        return found
    stopped = f"early stopping: {stopping.monitor} "
    why = ended.removeprefix(stopped) if ended.startswith(stopped) else ""
    reasons: Any = type(reason)  # an enum
    name = next(name for words, name in _STOPPING_REASONS.items() if (words in why if words else not why))
    message = f"Monitored metric {stopping.monitor} {why}" if why else None
    return {**found, "stopping_reason": reasons[name], "stopping_reason_message": message}


def _model_checkpoint_attributes(run: str, best: Callback | None) -> dict[str, Any]:
    """Return paths and score of weights: Lightning's files after a fit, else folders."""
    last = exported_path(run, "last")
    found: dict[str, Any] = {"dirpath": run, "last_model_path": last, "best_model_path": last}
    if isinstance(best, BestCheckpoint):
        has_any = best.best_step >= 0
        path, score = (exported_path(run, "best"), torch.tensor(best.best)) if has_any else ("", None)
        several: dict[str, Any] = {best.path_of(run, name): torch.tensor(value) for value, _, name in best.kept}
        path = next(iter(several), path)
        kept = several or ({path: score} if has_any else {})
        found |= {"best_model_path": path, "best_model_score": score, "current_score": score, "best_k_models": kept}
    return found
