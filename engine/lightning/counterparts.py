"""What stands here for Lightning's own callbacks, and what those say then of the run."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from midstride.engine.modules.callbacks import BestCheckpoint, Callback, EarlyStopping, LearningRateMonitor

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["COUNTERPARTS", "origins_of", "update_origins"]

log = logging.getLogger(__name__)


def _early_stopping(given: Any, faults: list[str]) -> Callback:
    options = [
        name for name in ("stopping_threshold", "divergence_threshold") if getattr(given, name, None) is not None
    ]
    if options:
        faults.append(
            f"callbacks: EarlyStopping({options[0]}={getattr(given, options[0])!r}) has no counterpart: call "
            "trainer.stop() in a hook where the value is reached"
        )
    return EarlyStopping(given.monitor, given.patience, given.mode, abs(given.min_delta), given.check_finite)


def _model_checkpoint(given: Any, faults: list[str]) -> Callback | None:
    """Return what keeps the best weights; snapshots do the rest."""
    if given.dirpath or given.filename:
        where = f"dirpath={str(given.dirpath)!r}" if given.dirpath else f"filename={given.filename!r}"
        log.warning("ModelCheckpoint(%s) is not used: weights are in the folder of the run, see best_model_path", where)
    if given.monitor is None:
        return None
    if given.save_top_k not in (0, 1):
        log.warning("ModelCheckpoint(save_top_k=%s): the best weights alone are kept, in best/", given.save_top_k)
    return BestCheckpoint(given.monitor, given.mode)


def _learning_rate_monitor(given: Any, faults: list[str]) -> Callback:
    for name in ("log_momentum", "log_weight_decay"):
        if getattr(given, name, False):
            log.warning("LearningRateMonitor(%s=True): learning rates alone are logged; log it in a hook", name)
    return LearningRateMonitor()


def _lambda_callback(given: Any, faults: list[str]) -> Any:
    """Return a callback as a user would have written it, whose methods call the functions."""
    functions, base = dict(vars(given)), type(given).__mro__[1]
    written_in = next((function.__module__ for function in functions.values() if hasattr(function, "__module__")), "")
    methods = {name: _calling(name) for name in functions}
    made: Any = type("LambdaCallback", (base,), {**methods, "__module__": written_in})()
    vars(made).update(functions=functions)
    return made


def _calling(name: str) -> Callable[..., Any]:
    return lambda self, *given: self.functions[name](*given)


#: Lightning's callbacks -> what makes the one that stands for it, or None if nothing has to
COUNTERPARTS: dict[str, Callable[[Any, list[str]], Any]] = {
    "EarlyStopping": _early_stopping,
    "LambdaCallback": _lambda_callback,
    "LearningRateMonitor": _learning_rate_monitor,
    "ModelCheckpoint": _model_checkpoint,
}


def origins_of(trainer: "TrainerInterface", kind: str) -> list[Any]:
    """Return Lightning's own callbacks of class `kind` that `trainer` was given, with what they say of the run now."""
    update_origins(trainer)
    return [given for given, _ in trainer.origins if type(given).__name__ == kind]


def update_origins(trainer: "TrainerInterface") -> None:
    """Have Lightning's own callbacks say what those that stand for them have seen."""
    for given, counterpart in trainer.origins:
        if isinstance(counterpart, EarlyStopping):
            vars(given).update(_of_stopping(trainer, counterpart))
        elif type(given).__name__ == "ModelCheckpoint" and trainer.run_url is not None:
            vars(given).update(_of_checkpoint(trainer.run_url.rstrip("/"), counterpart))


def _of_stopping(trainer: "TrainerInterface", stopping: EarlyStopping) -> dict[str, Any]:
    progress = trainer.progress
    last = progress.epoch if progress.batch else progress.epoch - 1
    stopped = last if stopping.wait_count >= stopping.patience else 0
    return {"best_score": torch.tensor(stopping.best), "wait_count": stopping.wait_count, "stopped_epoch": stopped}


def _of_checkpoint(run: str, best: Callback | None) -> dict[str, Any]:
    """Return where weights are: folders, which `ckpt_path` of `validate`, `test` and `predict` takes."""
    found: dict[str, Any] = {"dirpath": run, "last_model_path": f"{run}/last", "best_model_path": f"{run}/last"}
    if isinstance(best, BestCheckpoint):
        has_any = best.best_step >= 0
        path, score = (f"{run}/best", torch.tensor(best.best)) if has_any else ("", None)
        kept = {path: score} if has_any else {}
        found |= {"best_model_path": path, "best_model_score": score, "current_score": score, "best_k_models": kept}
    return found
