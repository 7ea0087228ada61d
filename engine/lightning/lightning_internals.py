"""Private names of Lightning."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["rates_of"]


def rates_of(monitor: Any, trainer: "TrainerInterface", interval: str) -> dict[str, float]:
    """Return the values that Lightning's LearningRateMonitor reads, by its names.

    Args:
        monitor: the monitor, which notes them, too.
        trainer: the Trainer whose optimizers are read.
        interval: "step" or "epoch", of schedulers that step then; "any" for all.
    """
    strategy = SimpleNamespace(root_device=None)
    read = SimpleNamespace(
        lr_scheduler_configs=trainer.schedulers, optimizers=trainer.optimizers, callback_metrics={}, strategy=strategy
    )
    found: dict[str, float] = monitor._extract_stats(read, interval)
    return found
