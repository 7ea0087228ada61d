"""Lightning's callbacks: those that a user wrote, and which of its own have a counterpart here."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from midstride.engine.errors import JobError
from midstride.engine.lightning.counterparts import COUNTERPARTS
from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.modules.callbacks import Callback

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["LightningCallback", "translated"]

log = logging.getLogger(__name__)


class LightningCallback(Callback):
    """What stands in place of the methods of Lightning's Callback, where the user has not written them."""

    def trainer_view(self, trainer: "TrainerInterface") -> Any:
        """Return `trainer` under Lightning's names."""
        return LightningTrainer(trainer)


#: Lightning's callbacks of which nothing is left to do
_NOTHING = frozenset({"ModelSummary", "RichModelSummary", "ProgressBar", "RichProgressBar", "TQDMProgressBar"})
_IN_THE_MODULE = "do it in a hook of the module, where its state is kept"
#: Lightning's callbacks that need the inside of its Trainer -> the way out
_REFUSED = {
    "BaseFinetuning": "freeze in setup, unfreeze and add_param_group in on_train_epoch_start",
    "BackboneFinetuning": "freeze in setup, unfreeze and add_param_group in on_train_epoch_start",
    "BasePredictionWriter": "write what predict returns",
    "BatchSizeFinder": "choose the batch size before the run: it is part of what a run is",
    "DeviceStatsMonitor": "run torch.profiler, or log what torch.cuda.memory_stats() says in a hook",
    "EMAWeightAveraging": "hold a torch.optim.swa_utils.AveragedModel and update it in on_train_batch_end",
    "GradientAccumulationScheduler": "say accumulate_grad_batches, one number for the run",
    "LearningRateFinder": "choose the learning rate before the run",
    "OnExceptionCheckpoint": "snapshots are on by default, and a failed run goes on from the newest",
    "StochasticWeightAveraging": "hold a torch.optim.swa_utils.AveragedModel and update it in on_train_epoch_end",
    "ThroughputMonitor": "the report of a run has its steps per second",
    "Timer": "say max_steps; send SIGTERM to stop after a time, and the same run again goes on",
    "WeightAveraging": "hold a torch.optim.swa_utils.AveragedModel and update it in on_train_batch_end",
}


def translated(callbacks: Any, adapt: Callable[[Any], Any]) -> list[tuple[Any, Callback | None]]:
    """Return each of `callbacks` with what acts in its place: itself, or what stands here for one of Lightning's own.

    Args:
        callbacks: one or several, or None: ours, Lightning's, and those that a user derived from Lightning's Callback.
        adapt: makes one of the last kind ours, in place.

    Raises:
        JobError: with every callback that needs the inside of Lightning's Trainer.
    """
    found: list[tuple[Any, Callback | None]] = []
    faults: list[str] = []
    several: Sequence[Any] = (
        callbacks if isinstance(callbacks, (list, tuple)) else () if callbacks is None else [callbacks]
    )
    for callback in several:
        own = _library_class(type(callback))
        if own is None or isinstance(callback, Callback):
            acting = adapt(callback)
            found.append((callback, acting))
            if not (acting is None or isinstance(acting, Callback)):
                faults.append(f"callbacks: should be objects of classes derived from Callback, not {callback!r}")
        elif type(callback).__name__ != own:
            faults.append(_fault(f"{type(callback).__name__}, derived from Lightning's {own},", own))
        elif own in COUNTERPARTS:
            found.append((callback, adapt(COUNTERPARTS[own](callback, faults))))
        elif own in _NOTHING:
            log.info("%s: leave it out, the progress bar and the report are midstride's", own)
        else:
            faults.append(_fault(own, own))
    if faults:
        raise JobError.of("Trainer(...)", faults)
    return found


def _library_class(kind: type) -> str | None:
    """Return the name of the callback of Lightning's that `kind` is, or derives from; None if it is none."""
    for one in kind.__mro__:
        if one.__module__.startswith(("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.")):
            return None if one.__name__ == "Callback" else one.__name__
    return None


def _fault(who: str, own: str) -> str:
    return f"callbacks: {who} needs the inside of Lightning's Trainer: {_REFUSED.get(own, _IN_THE_MODULE)}"
