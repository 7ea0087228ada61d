"""The methods of LightningModule and LightningDataModule, implemented by the engine."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.errors import UserError
from midstride.engine.formatting import url_name
from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.modules.module import DataModule, TrainingModule

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["LightningData", "LightningMethods"]

#: parameters of `self.log` after name and value, in Lightning's order
_LOG_ARGUMENTS = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group"),
    *("add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only"),
)
#: parameters that are ignored: every value is detached and written to metrics.csv, and all ranks or one may log it
_WITHOUT_EFFECT = frozenset({"logger", "enable_graph", "sync_dist_group", "metric_attribute", "rank_zero_only"})
_REDUCTIONS: dict[Any, str] = {
    **{torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"},
    "avg": "mean",
    sum: "sum",
    max: "max",
    min: "min",
}


class HandedOver:
    """An adapted object that can be given to Lightning's own Trainer."""

    _written: type[Any]

    def hand_over(self, trainer: Any) -> None:
        """Restore the original class until a fit adapts it again, and set its `trainer`."""
        vars(self)["_trainer"] = None
        self.__class__ = self._written
        object.__setattr__(self, "trainer", trainer)


class LightningMethods(HandedOver, TrainingModule):
    """Replaces the methods of LightningModule that the user has not overridden."""

    #: attributes that are not part of snapshots: the engine sets them, or every attempt sets them anew
    not_state = frozenset(
        {"_device", "_dtype", "_fabric", "_device_mesh", "_metric_attributes", "_current_fx_name", "_logger"}
    )

    @property
    def trainer(self) -> Any:
        """The Trainer of this module, with the attributes of Lightning's Trainer."""
        return LightningTrainer(super().trainer)

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.hand_over(trainer)

    @property
    def device(self) -> torch.device:
        """The device of this module."""
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._device = device

    @property
    def logger(self) -> "LightningLogger":
        """Logs numbers, for all trackers of the Trainer."""
        found: LightningLogger | None = self.__dict__.get("_logger")
        if found is None:
            found = self.__dict__["_logger"] = LightningLogger(self)
        return found

    @property
    def loggers(self) -> "list[LightningLogger]":
        """A list of `logger` alone."""
        return [self.logger]

    def log(self, name: str, value: Any, *given: Any, **options: Any) -> None:
        """Log a value; arguments and their order are those of `LightningModule.log`."""
        options |= dict(zip(_LOG_ARGUMENTS, given, strict=False))
        if unknown := options.keys() - set(_LOG_ARGUMENTS):
            raise TypeError(f"log() got an unexpected keyword argument {min(unknown)!r}")
        reduce_fx = options.get("reduce_fx", "mean")
        options["reduce_fx"] = (
            reduce_fx.lower() if isinstance(reduce_fx, str) else _REDUCTIONS.get(reduce_fx, reduce_fx)
        )
        if not isinstance(options["reduce_fx"], str):
            raise UserError(f"self.log({name!r}, reduce_fx={reduce_fx!r}): choose mean, sum, min or max")
        options = {key: given for key, given in options.items() if key not in _WITHOUT_EFFECT}
        for key, entry in value.items() if isinstance(value, dict) else [(name, value)]:
            super().log(key, entry, **options)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several; with `use_pl_optimizer` False, torch's own."""
        found = self.trainer.optimizers
        if use_pl_optimizer:
            found = [LightningOptimizer(optimizer, self) for optimizer in found]
        return found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Run the backward pass of `loss` with `Tensor.backward`'s options; average over ranks."""
        self.trainer.backward(loss, **dict(zip(("gradient", "retain_graph"), args, strict=False)), **options)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return `data` with every tensor in it stacked over the ranks, or unchanged on one process."""
        if sync_grads and self.trainer.world_size > 1:
            raise UserError(
                "all_gather(sync_grads=True): gradients do not pass through all_gather here; leave sync_grads out"
            )
        return super().all_gather(data)


class LightningOptimizer:
    """Optimizer with Lightning's additions; other attributes are the wrapped optimizer's.

    Args:
        optimizer: the optimizer to wrap.
        module: the module that it trains.
    """

    optimizer: Optimizer
    _module: Any

    def __init__(self, optimizer: Optimizer, module: Any) -> None:
        vars(self).update(optimizer=optimizer, _module=module)

    #: class of the wrapped optimizer, so that `isinstance(self.optimizers(), torch.optim.Adam)` holds
    __class__: Any = property(lambda self: type(self.optimizer))

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in vars(self):  # during a copy or unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":  # a scheduler patches `step` to count calls
            vars(self)[name] = value
        else:
            setattr(self.optimizer, name, value)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step, after `closure` if there is one, and the hooks `on_before_optimizer_step`."""
        return self._module.trainer.step_optimizer(self.optimizer, closure, **options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters collect gradients; `sync_grad` has no effect."""
        self._module.toggle_optimizer(self)
        try:
            yield
        finally:
            self._module.untoggle_optimizer(self)


class LightningData(HandedOver, DataModule):
    """Replaces the methods of LightningDataModule that the user has not overridden."""

    _trainer: "list[TrainerInterface]"

    @property
    def trainer(self) -> Any:
        """Trainer that reads these data, with the attributes of Lightning's; None before that."""
        return LightningTrainer(self._trainer[0]) if self._trainer else None

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.hand_over(trainer)


log = logging.getLogger(__name__)


class LightningLogger:
    """Logs numbers as `self.log` does, exact over a resume; drops other values with a warning.

    Args:
        module: module whose `self.logger` this is.
    """

    def __init__(self, module: TrainingModule) -> None:
        self._module = module
        self._warned: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the run."""
        return url_name(self.save_dir)

    @property
    def version(self) -> int:
        """0: a run has one version, however often it is resumed."""
        return 0

    @property
    def save_dir(self) -> str:
        """Folder or URL of the run; without a run, the working directory."""
        return self._module.trainer.run_url or str(Path.cwd())

    log_dir = root_dir = save_dir

    @property
    def experiment(self) -> "_Experiment":
        """Substitute for the experiment object of a tracker."""
        return _Experiment(self)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at the current step of the run; `step` is ignored."""
        for name, value in metrics.items():
            self.log_value("log_metrics", name, value)

    def log_hyperparams(self, params: Any, metrics: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Add hyperparameters to those of the run; each tracker receives them once.

        Args:
            params: a mapping, which may be nested, or a namespace.
            metrics: ignored.
            named: further hyperparameters.
        """
        given = dict(params if isinstance(params, Mapping) else vars(params)) | named
        self._module.trainer.metric_logger.hparams.update({str(key): _plain(value) for key, value in given.items()})

    def log_value(self, method: str, name: str, value: Any) -> None:
        """Log a number passed to `method`; where `self.log` is refused, in the last step's row."""
        logged = self._module.trainer.metric_logger
        if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
            self.warn_no_effect(f"{method}({name!r}: {type(value).__name__})")
        elif not logged.closed:
            TrainingModule.log(self._module, name, value)  # a module may have written its own
        elif logged.rows.is_closed:
            self.warn_no_effect(f"{method}({name!r}), where there is no row to stand in,")
        else:
            logged.rows.set_current(name, float(value))

    def warn_no_effect(self, what: str) -> None:
        """Warn on rank 0, once per `what`, of a call that reaches no tracker."""
        if what not in self._warned and self._module.trainer.world.is_first:
            log.warning(
                "self.logger.%s has no effect: trackers receive only the numbers in metrics.csv. Log numbers with "
                "self.log, and write other things to your own files",
                what,
            )
        self._warned.add(what)

    def __getattr__(self, name: str) -> "_NoEffect":
        """Return a substitute for a method of a tracker's logger, which warns when it is called."""
        if name.startswith("_"):
            raise AttributeError(f"the logger of a run has no {name}")
        return _NoEffect(self, name)


class _NoEffect:
    """Substitute for a tracker's method or object, without an effect except for a warning."""

    def __init__(self, logger: LightningLogger, name: str) -> None:
        self._logger, self._name = logger, name

    def __call__(self, *given: Any, **options: Any) -> "_NoEffect":
        """Warn; the returned object has no effect either."""
        self._logger.warn_no_effect(self._name)
        return self

    def __getitem__(self, key: str) -> "_NoEffect":
        return _NoEffect(self._logger, f"{self._name}[{key!r}]")

    def __setitem__(self, key: str, value: object) -> None:
        self._logger.warn_no_effect(f"{self._name}[{key!r}]")

    def __getattr__(self, name: str) -> "_NoEffect":
        if name.startswith("_"):
            raise AttributeError(f"self.logger.{self._name} has no {name}")
        return _NoEffect(self._logger, f"{self._name}.{name}")


class _Experiment(_NoEffect):
    """Logging methods of TensorBoard's writer, W&B's run and MLflow's client."""

    def __init__(self, logger: LightningLogger) -> None:
        super().__init__(logger, "experiment")

    def add_scalar(self, tag: str, scalar_value: Any, *given: Any, **options: Any) -> None:
        """Log a number (TensorBoard)."""
        self._logger.log_value("experiment.add_scalar", tag, scalar_value)

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], *given: Any, **options: Any) -> None:
        """Log several numbers (TensorBoard)."""
        for tag, value in tag_scalar_dict.items():
            self._logger.log_value("experiment.add_scalars", f"{main_tag}/{tag}", value)

    def log(self, data: Mapping[str, Any], *given: Any, **options: Any) -> None:
        """Log numbers (W&B)."""
        for name, value in data.items():
            self._logger.log_value("experiment.log", name, value)

    def log_metric(self, run_id: str, key: str, value: Any, *given: Any, **options: Any) -> None:
        """Log a number (MLflow)."""
        self._logger.log_value("experiment.log_metric", key, value)

    def add_hparams(self, hparam_dict: Mapping[str, Any], metric_dict: Mapping[str, Any], *given: Any) -> None:
        """Add hyperparameters (TensorBoard)."""
        self._logger.log_hyperparams(hparam_dict)

    def log_param(self, run_id: str, key: str, value: Any, *given: Any) -> None:
        """Add a hyperparameter (MLflow)."""
        self._logger.log_hyperparams({key: value})

    @property
    def config(self) -> "_Config":
        """Substitute for W&B's `run.config`."""
        return _Config(self._logger)


class _Config(_NoEffect):
    """W&B's `run.config`: its items and `update` add hyperparameters."""

    def __init__(self, logger: LightningLogger) -> None:
        super().__init__(logger, "experiment.config")

    def __setitem__(self, key: str, value: Any) -> None:
        self._logger.log_hyperparams({key: value})

    def update(self, params: Any, *given: Any, **options: Any) -> None:
        """Add hyperparameters."""
        self._logger.log_hyperparams(params)


def _plain(value: Any) -> Any:
    """Return `value` with tensors and arrays of no dimensions as numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value.item() if getattr(value, "ndim", None) == 0 else value
