"""The methods of LightningModule and LightningDataModule, implemented by the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.errors import UserError
from midstride.engine.lightning.logger import LightningLogger
from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.modules.module import DataModule, TrainingModule

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["LightningData", "LightningMethods", "LightningOptimizer"]

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
    def logger(self) -> LightningLogger:
        """Logs numbers, for all trackers of the Trainer."""
        found: LightningLogger | None = self.__dict__.get("_logger")
        if found is None:
            found = self.__dict__["_logger"] = LightningLogger(self)
        return found

    @property
    def loggers(self) -> list[LightningLogger]:
        """A list of `logger` alone."""
        return [self.logger]

    def log(self, name: str, value: Any, *given: Any, **options: Any) -> None:
        """Log a value; arguments and their order are those of `LightningModule.log`."""
        options |= dict(zip(_LOG_ARGUMENTS, given, strict=False))
        if unknown := options.keys() - set(_LOG_ARGUMENTS):
            raise TypeError(f"log() got an unexpected keyword argument {min(unknown)!r}")
        reduce_fx = options.get("reduce_fx", "mean")
        options["reduce_fx"] = _REDUCTIONS.get(reduce_fx, reduce_fx)
        if not isinstance(options["reduce_fx"], str):
            raise UserError(f"self.log({name!r}, reduce_fx={reduce_fx!r}): there are: mean, sum, min and max")
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
            raise UserError("all_gather(sync_grads=True): gradients do not go through it here; leave sync_grads out")
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
