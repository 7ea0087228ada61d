"""The counterparts of Lightning's own callbacks, and the attributes of those after a run."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from midstride.engine.lightning.checkpoint import exported_path
from midstride.engine.modules.averaging import WeightAveraging
from midstride.engine.modules.callbacks import Callback, LearningRateMonitor
from midstride.engine.modules.monitors import BestCheckpoint, EarlyStopping

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["COUNTERPARTS", "MAY_OVERRIDE", "lightning_callbacks", "update_lightning_callbacks"]

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
    if given.dirpath or given.filename:
        where = f"dirpath={str(given.dirpath)!r}" if given.dirpath else f"filename={given.filename!r}"
        log.warning("ModelCheckpoint(%s) is not used: weights are in the folder of the run, see best_model_path", where)
    if given.monitor is None:
        return None
    if given.save_top_k not in (0, 1):
        log.warning("ModelCheckpoint(save_top_k=%s): the best weights alone are kept, in best/", given.save_top_k)
    at_epoch_end = vars(given)["_save_on_train_epoch_end"]
    return BestCheckpoint(given.monitor, given.mode, check_on_train_epoch_end=at_epoch_end)


def _learning_rate_monitor(given: Any, faults: list[str]) -> Callback:
    for name in ("log_momentum", "log_weight_decay"):
        if getattr(given, name, False):
            log.warning("LearningRateMonitor(%s=True): learning rates alone are logged; log it in a hook", name)
    return LearningRateMonitor()


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
        """Return what the given callback returns."""
        return bool(self._given.should_update(step_idx=step_idx, epoch_idx=epoch_idx))


def _weight_averaging(given: Any, faults: list[str]) -> Callback:
    return LightningAveraging(given)


#: class of Lightning's -> function from such a callback, and a list to append faults to, to its counterpart or None
COUNTERPARTS: dict[str, Callable[[Any, list[str]], Any]] = {
    "EMAWeightAveraging": _weight_averaging,
    "EarlyStopping": _early_stopping,
    "LambdaCallback": _lambda_callback,
    "LearningRateMonitor": _learning_rate_monitor,
    "ModelCheckpoint": _model_checkpoint,
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
        if isinstance(counterpart, EarlyStopping):
            vars(given).update(_early_stopping_attributes(counterpart))
        elif type(given).__name__ == "ModelCheckpoint" and trainer.run_url is not None:
            vars(given).update(_model_checkpoint_attributes(trainer.run_url.rstrip("/"), counterpart))


def _early_stopping_attributes(stopping: EarlyStopping) -> dict[str, Any]:
    counts = {"wait_count": stopping.wait_count, "stopped_epoch": stopping.stopped_epoch}
    return {"best_score": torch.tensor(stopping.best), **counts}


def _model_checkpoint_attributes(run: str, best: Callback | None) -> dict[str, Any]:
    """Return paths and score of weights: Lightning's files after a fit, else folders."""
    last = exported_path(run, "last")
    found: dict[str, Any] = {"dirpath": run, "last_model_path": last, "best_model_path": last}
    if isinstance(best, BestCheckpoint):
        has_any = best.best_step >= 0
        path, score = (exported_path(run, "best"), torch.tensor(best.best)) if has_any else ("", None)
        kept = {path: score} if has_any else {}
        found |= {"best_model_path": path, "best_model_score": score, "current_score": score, "best_k_models": kept}
    return found
