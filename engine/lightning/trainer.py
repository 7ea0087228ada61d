"""A Trainer with the attributes of Lightning's."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from midstride.engine.config.options import TrainerOptions
from midstride.engine.lightning.counterparts import lightning_callbacks
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.schedules import window_of

__all__ = ["LightningStrategy", "LightningTrainer"]

#: attributes of Lightning's Trainer that are constant here
_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("interrupted", "received_sigterm", "sanity_checking"), False),
    **dict.fromkeys(("num_sanity_val_steps", "reload_dataloaders_every_n_epochs"), 0),
    **dict.fromkeys(("ckpt_path", "profiler", "progress_bar_callback"), None),
    **dict.fromkeys(("enable_autolog_hparams", "enable_validation"), True),
    "log_every_n_steps": 1,
}
_AFTERWARDS = "call it on the Trainer, once the fit is over"
#: attributes of Lightning's Trainer without a counterpart -> what to use instead
_REFUSED = {
    **dict.fromkeys(("fit", "predict", "test", "validate"), _AFTERWARDS),
    **dict.fromkeys(("accelerator", "device_ids"), "strategy.root_device is where this rank computes"),
    **dict.fromkeys(("precision_plugin", "scaler"), "precision says what the Trainer was given"),
    **dict.fromkeys(("fit_loop", "validate_loop", "test_loop", "predict_loop"), "progress has every count"),
}
_WINDOWS = "step by hand, with automatic_optimization = False, where a window ends"


def _is_ours(name: str) -> bool:
    return (not name.startswith("_") and hasattr(TrainerInterface, name)) or name in TrainerInterface.__annotations__


class LightningTrainer:
    """Trainer as `self.trainer` of a LightningModule and argument of Lightning's callbacks.

    It also has all attributes of `TrainerInterface`, and the options of the Trainer as read-only attributes.

    Args:
        trainer: that runs the module.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in TrainerOptions.model_fields:
            return getattr(self._trainer.options, name)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in ("barebones", "fast_dev_run"):
            return self._trainer.arguments[name]
        if _is_ours(name):
            return getattr(self._trainer, name)
        if name in (users := self._trainer.set_by_users()):
            return users[name]
        why = _REFUSED.get(name, "docs/lightning.md lists what a module or a callback may use of Lightning's")
        raise AttributeError(f"this run's Trainer has no {name}: {why}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_trainer", "should_stop"):
            super().__setattr__(name, value)
        elif name != "optimizers" and (
            name in TrainerOptions.model_fields or name in _CONSTANTS or _is_ours(name) or hasattr(type(self), name)
        ):
            way = _WINDOWS if name == "accumulate_grad_batches" else "give it to Trainer(...)"
            raise AttributeError(f"trainer.{name} cannot be set here, as all attempts need the same value: {way}")
        else:
            setattr(self._trainer, name, value)

    @property
    def should_stop(self) -> bool:
        """Whether the fit ends after this batch or epoch; all ranks set it at the same point."""
        return self._trainer.progress.stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self._trainer.stop()

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest logged values by name, as scalar tensors."""
        return _tensors(self._trainer.callback_metrics)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Newest logged values by their loggers' names, with each step's value in evaluation."""
        return _tensors(self._logged())

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values in `logged_metrics` that were logged with `prog_bar`, as numbers."""
        shown = self._trainer.metric_logger.progress_bar_names
        return {name: float(value) for name, value in self._logged().items() if name in shown}

    def _logged(self) -> dict[str, Any]:
        logger = self._trainer.metric_logger
        twice = {*logger.common_names.values()}  # a step's and an epoch's value, each with a name of its own
        values = {name: value for name, value in logger.values.items() if name not in twice}
        return {**values, **logger.evaluation_values}

    @property
    def accumulate_grad_batches(self) -> int:
        """The batches of this epoch that make one optimizer step."""
        return window_of(self._trainer.options, self._trainer.callbacks, self._trainer.progress.epoch)

    @property
    def precision(self) -> str:
        """The precision by Lightning's name, such as "bf16-mixed"."""
        return self._trainer.precision

    @property
    def min_epochs(self) -> int:
        """Epochs before the fit may be stopped."""
        return self._trainer.options.least_epochs

    @property
    def max_epochs(self) -> int:
        """Epochs after which the fit ends; -1 if there is no limit."""
        epochs = self._trainer.options.max_epochs
        return -1 if epochs is None else epochs

    @property
    def max_steps(self) -> int:
        """Optimizer steps after which the fit ends; -1 if there is no limit."""
        steps = self._trainer.options.max_steps
        return -1 if steps is None else steps

    @property
    def num_training_batches(self) -> float:
        """Training batches in an epoch; infinite if the number is unknown."""
        return _known(self._trainer.num_training_batches)

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader; infinite if the number is unknown."""
        return [_known(batches) for batches in self._trainer.num_val_batches]

    @property
    def test_dataloaders(self) -> Any:
        """The loaders of a test as they were given; None without any."""
        return self._trainer.given_loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loaders of a prediction as they were given; None without any."""
        return self._trainer.given_loaders.get("predict")

    @property
    def lightning_module(self) -> Any:
        """The module that is trained or evaluated."""
        return self._trainer.module

    model = lightning_module

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The learning rate schedulers, with their interval and frequency."""
        return list(self._trainer.schedulers)

    @property
    def num_devices(self) -> int:
        """Number of ranks on this machine."""
        return self._trainer.world.local_size

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._trainer.world.nodes

    @property
    def node_rank(self) -> int:
        """Index of this machine, from 0."""
        return self._trainer.world.node

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All ModelCheckpoint callbacks, with paths and score of the best and last weights."""
        return lightning_callbacks(self._trainer, "ModelCheckpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first ModelCheckpoint callback, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All EarlyStopping callbacks, with their counts."""
        return lightning_callbacks(self._trainer, "EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        if self._trainer.is_global_zero:
            print(*values, **options)

    @property
    def strategy(self) -> "LightningStrategy":
        """Collectives over the ranks, and the device of this rank."""
        return LightningStrategy(self._trainer)

    @property
    def state(self) -> SimpleNamespace:
        """Current or last call.

        `fn`, None before the first; `stage`, in a fit "train" or "validate"; `status`.
        """
        stage, status = self._trainer.metric_logger.stage, self._trainer.status
        ends = {"finished": status == "finished", "stopped": status in ("finished", "interrupted")}
        return SimpleNamespace(fn=self._trainer.verb or None, stage=stage, status=status, **ends)

    @property
    def logger(self) -> Any:
        """The logger of the module."""
        return self._trainer.module.logger

    @property
    def loggers(self) -> list[Any]:
        """A list of `logger` alone."""
        return [self.logger]

    @property
    def log_dir(self) -> str | None:
        """Folder or URL of the run; None without a run."""
        return self._trainer.run_url

    @property
    def default_root_dir(self) -> str:
        """The folder given to the Trainer; else folder or URL of the run, or the working directory."""
        if not (given := self._trainer.arguments.get("default_root_dir")):
            return self._trainer.run_url or str(Path.cwd())
        return given if "://" in str(given) else str(Path(given).expanduser())

    @property
    def training(self) -> bool:
        """Whether a fit is running, except during its validations."""
        return self._trainer.is_fitting and self._trainer.metric_logger.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is running."""
        return self._trainer.metric_logger.stage == "validate"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a test is running."""
        return self.validating or self.testing

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self._trainer.metric_logger.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is running."""
        return self._trainer.metric_logger.stage == "predict"


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    kind = torch.get_default_dtype()
    return {
        name: value.to(kind) if isinstance(value, Tensor) else torch.tensor(value)  # tensors stay on their device
        for name, value in values.items()
    }


def _known(batches: int | None) -> float:
    return math.inf if batches is None else batches


class LightningStrategy:
    """Supported part of `self.trainer.strategy`; all ranks call a method at the same point.

    Args:
        trainer: that runs the module.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.strategy.{name} is not supported: use barrier, broadcast, reduce or root_device, or "
            f"self.all_gather of the module"
        )

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return next(self._trainer.module.parameters()).device

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._trainer.gather(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `obj` of rank `src`."""
        return self._trainer.gather(obj)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Return the mean ("mean", "avg") or the sum ("sum") of a tensor or a number over all ranks."""
        values = torch.stack([torch.as_tensor(value) for value in self._trainer.gather(tensor)])
        summed = values.sum(dim=0)
        return summed if str(reduce_op).lower() == "sum" else summed / len(values)
