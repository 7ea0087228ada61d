"""A Trainer under the names that Lightning's has."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midstride.engine.config.options import TrainerOptions
from midstride.engine.modules.interface import TrainerInterface

__all__ = ["LightningTrainer"]

#: what is asked for and is never so here
_NEVER = {"barebones": False, "fast_dev_run": False, "sanity_checking": False, "enable_validation": True}
_NONE = frozenset({"checkpoint_callback", "early_stopping_callback", "profiler", "progress_bar_callback"})
#: a name of Lightning's Trainer that has no counterpart -> the way out
_REFUSED = {
    "save_checkpoint": 'snapshots are taken as the Trainer says; save_weights("best") writes the weights',
    "strategy": "gather, backward and clip_gradients of this object are what a module may use of it",
}


class LightningTrainer:
    """A Trainer as `self.trainer` of a LightningModule and as the first argument of a callback of Lightning's.

    Beside what is here it has all of `TrainerInterface` and, for reading, the options of the Trainer by name.

    Args:
        trainer: that runs the module.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in TrainerOptions.model_fields:
            return getattr(self._trainer.options, name)
        if name in _NEVER:
            return _NEVER[name]
        if name in _NONE:
            return None
        if (not name.startswith("_") and hasattr(TrainerInterface, name)) or name in TrainerInterface.__annotations__:
            return getattr(self._trainer, name)
        why = _REFUSED.get(name, "docs/lightning.md lists what a module or a callback may use of it")
        raise AttributeError(f"trainer.{name} is Lightning's own, and this run's Trainer has none: {why}")

    @property
    def should_stop(self) -> bool:
        """Whether the fit ends at the next boundary; True may be set, at the same point on every rank."""
        return self._trainer.progress.stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self._trainer.stop()

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest logged values by name, each a tensor of one number."""
        return {name: torch.tensor(value) for name, value in self._trainer.callback_metrics.items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def max_epochs(self) -> int:
        """Passes over the data after which the fit ends; -1 if only steps are counted."""
        epochs = self._trainer.options.max_epochs
        return -1 if epochs is None else epochs

    @property
    def max_steps(self) -> int:
        """Optimizer steps after which the fit ends; -1 if only epochs are counted."""
        steps = self._trainer.options.max_steps
        return -1 if steps is None else steps

    @property
    def num_training_batches(self) -> float:
        """Training batches of an epoch; infinite where only reading them tells."""
        batches = self._trainer.num_training_batches
        return math.inf if batches is None else batches

    @property
    def lightning_module(self) -> Any:
        """The module in training."""
        return self._trainer.module

    model = lightning_module

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers, each with when it steps."""
        return list(self._trainer.schedulers)

    @property
    def logger(self) -> Any:
        """The module's."""
        return self._trainer.module.logger

    @property
    def loggers(self) -> list[Any]:
        """The one above."""
        return [self.logger]

    @property
    def log_dir(self) -> str | None:
        """The run's folder or URL, if the fit is kept."""
        return self._trainer.run_url

    @property
    def default_root_dir(self) -> str:
        """The run's folder or URL, or else the working directory."""
        return self._trainer.run_url or str(Path.cwd())

    @property
    def training(self) -> bool:
        """Whether a training batch, or an epoch, is under way."""
        return self._trainer.is_fitting and self._trainer.metric_logger.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is under way."""
        return self._trainer.metric_logger.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether a test is under way."""
        return self._trainer.metric_logger.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is under way."""
        return self._trainer.metric_logger.stage == "predict"
