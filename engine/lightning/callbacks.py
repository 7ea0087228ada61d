"""Callbacks derived from Lightning's, and counterparts of Lightning's own callbacks."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from midstride.engine.code_origin import module_of
from midstride.engine.errors import JobError
from midstride.engine.lightning.counterparts import COUNTERPARTS, MAY_OVERRIDE
from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.modules.callbacks import Callback

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["LightningCallback", "with_counterparts"]

log = logging.getLogger(__name__)


class LightningCallback(Callback):
    """Replaces the methods of Lightning's Callback that the user has not overridden."""

    def trainer_view(self, trainer: "TrainerInterface") -> Any:
        """Return `trainer` with the attributes of Lightning's Trainer."""
        _TRAINERS[self] = weakref.ref(trainer)
        return LightningTrainer(trainer)

    def _running_module(self) -> Any:
        trainer = _TRAINERS[self]()
        assert trainer is not None  # it calls the hook that logs
        return trainer.module

    def log(self, *given: Any, **options: Any) -> None:
        """Log a value by the module of the current call; arguments are those of its `log`."""
        self._running_module().log(*given, **options)

    def log_dict(self, *given: Any, **options: Any) -> None:
        """Log several values; arguments are those of the module's `log_dict`."""
        self._running_module().log_dict(*given, **options)


#: a callback -> the Trainer of its newest call
_TRAINERS: "weakref.WeakKeyDictionary[LightningCallback, weakref.ref[TrainerInterface]]" = weakref.WeakKeyDictionary()


#: Lightning's callbacks that are left out, with a line in the log
_LEFT_OUT = frozenset({"ModelSummary", "RichModelSummary", "ProgressBar", "RichProgressBar", "TQDMProgressBar"})
_IN_THE_MODULE = "do it in a hook of the module, where its state is kept"
#: Lightning's callbacks that need internals of its Trainer -> what to use instead
_REFUSED = {
    "BaseFinetuning": "use midstride's Unfreeze, or freeze and unfreeze in the hooks of a plain Callback",
    "BackboneFinetuning": "use midstride's Unfreeze",
    "BasePredictionWriter": "write what predict returns, or write in on_predict_batch_end of a plain Callback",
    "BatchSizeFinder": "choose the batch size before the run: it is part of what a run is",
    "DeviceStatsMonitor": "run torch.profiler, or log what torch.cuda.memory_stats() says in a hook",
    "LearningRateFinder": "choose the learning rate before the run",
    "OnExceptionCheckpoint": "snapshots are on by default, and a failed run resumes from the newest",
    "StochasticWeightAveraging": "use WeightAveraging, with torch.optim.swa_utils.SWALR as scheduler",
    "ThroughputMonitor": "use midstride's Throughput; the report of a run has its steps per second",
}


def with_counterparts(callbacks: Any, adapt: Callable[[Any], Any]) -> list[tuple[Any, Callback | None]]:
    """Return pairs of a given callback and the one to call: itself or a counterpart.

    Args:
        callbacks: one callback, several, or None; they may derive from Lightning's Callback.
        adapt: see `midstride.engine.lightning.adapt.adapt`.

    Raises:
        JobError: it names all callbacks that need internals of Lightning's Trainer, and all objects that are none.
    """
    found: list[tuple[Any, Callback | None]] = []
    faults: list[str] = []
    several: Sequence[Any] = (
        callbacks if isinstance(callbacks, (list, tuple)) else () if callbacks is None else [callbacks]
    )
    for callback in several:
        own = _library_class(type(callback))
        if own is None or isinstance(callback, Callback):
            adapted = adapt(callback)
            found.append((callback, adapted))
            if not (adapted is None or isinstance(adapted, Callback)):
                name = callback.__name__ if isinstance(callback, type) else ""
                given = f"the class {name}: make one, {name}(...)" if name else repr(callback)
                faults.append(f"callbacks: should be objects of classes derived from Callback, not {given}")
        elif type(callback).__name__ != own and not _overrides_allowed(type(callback), own):
            faults.append(_fault(f"{type(callback).__name__}, derived from Lightning's {own},", own))
        elif own in COUNTERPARTS:
            found.append((callback, adapt(COUNTERPARTS[own](callback, faults))))
        elif own in _LEFT_OUT:
            log.info("%s is ignored, since midstride has its own progress bar and report: leave it out", own)
        else:
            faults.append(_fault(own, own))
    if faults:
        raise JobError.of("Trainer(...)", faults)
    return found


def _library_class(kind: type) -> str | None:
    """Return the name of the first callback class of Lightning's library that `kind` extends.

    None if there is none.
    """
    for one in kind.__mro__:
        if module_of(one).startswith(("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.")):
            return None if one.__name__ == "Callback" else one.__name__
    return None


def _overrides_allowed(kind: type, own: str) -> bool:
    """Return whether `kind` changes only methods of Lightning's `own` that it may override."""
    library = next(one for one in kind.__mro__ if one.__name__ == own and _library_class(one) == own)
    derived = kind.__mro__[: kind.__mro__.index(library)]
    written = {name for one in derived for name in vars(one) if hasattr(library, name) and not name.startswith("__")}
    return own in MAY_OVERRIDE and written <= MAY_OVERRIDE[own]


def _fault(who: str, own: str) -> str:
    return f"callbacks: {who} needs internals of Lightning's Trainer: {_REFUSED.get(own, _IN_THE_MODULE)}"
