"""Callbacks that change training from an epoch on: accumulation windows, frozen layers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from midstride.engine.errors import UserError
from midstride.engine.modules.callbacks import Callback

if TYPE_CHECKING:
    from midstride.engine.config.options import TrainerOptions
    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule

__all__ = ["GradientAccumulationScheduler", "Unfreeze", "largest_window", "window_of"]


class GradientAccumulationScheduler(Callback):
    """Changes the number of batches that make a step, from epoch to epoch.

    Args:
        scheduling: epoch, from 0 -> batches that make one optimizer step from then on; 1 before the first entry.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling or any(type(one) is not int for row in scheduling.items() for one in row):
            raise UserError(f"GradientAccumulationScheduler: epochs and numbers of batches are needed: {scheduling!r}")
        if min(scheduling) < 0 or min(scheduling.values()) < 1:
            raise UserError(f"GradientAccumulationScheduler: epochs from 0, batches from 1 are needed: {scheduling!r}")
        self.scheduling = dict(sorted(scheduling.items()))

    def window(self, epoch: int) -> int:
        """Return the batches that make a step in `epoch`."""
        return next((batches for first, batches in reversed(self.scheduling.items()) if first <= epoch), 1)

    def on_fit_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Check that windows are left to this callback.

        Raises:
            UserError: the Trainer has a window, or the module steps by hand.
        """
        if trainer.options.accumulate_grad_batches != 1:
            raise UserError(
                "accumulate_grad_batches and a GradientAccumulationScheduler both set the accumulation window: "
                "choose one"
            )
        if not module.automatic_optimization:
            raise UserError("GradientAccumulationScheduler: with manual optimization, step where a window ends")


def window_of(options: "TrainerOptions", callbacks: Sequence[Callback], epoch: int) -> int:
    """Return the batches that make a step in `epoch`."""
    schedules = (one.window(epoch) for one in callbacks if isinstance(one, GradientAccumulationScheduler))
    return next(schedules, options.accumulate_grad_batches)


def largest_window(options: "TrainerOptions", callbacks: Sequence[Callback]) -> "TrainerOptions":
    """Return `options` with the largest window of a fit, to find options that exclude windows."""
    schedules = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
    if not schedules:
        return options
    return options.model_copy(update={"accumulate_grad_batches": max(schedules[0].scheduling.values())})


class Unfreeze(Callback):
    """Freezes layers, and trains them from an epoch on.

    Parameters that no optimizer has by then join the first optimizer, as a group.

    Args:
        layers: one or several names of layers of the module, such as "backbone" or "encoder.blocks.3".
        epoch: first epoch in which they train, from 0.
        lr: learning rate of the new group; by default the optimizer's.
    """

    def __init__(self, layers: str | Sequence[str], epoch: int, lr: float | None = None) -> None:
        if type(epoch) is not int or epoch < 0:
            raise UserError(f"Unfreeze: epoch should be a whole number from 0 on, not {epoch!r}")
        self.layers, self.epoch, self.lr = [layers] if isinstance(layers, str) else [*layers], epoch, lr

    def setup(self, trainer: "TrainerInterface", module: "TrainingModule", stage: str) -> None:
        """Freeze the layers for a fit.

        Raises:
            UserError: the module lacks one of them.
        """
        if stage == "fit":
            for parameter in self._parameters(module):
                parameter.requires_grad_(False)

    def on_train_epoch_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Let the layers train."""
        if trainer.current_epoch != self.epoch:
            return
        parameters = self._parameters(module)
        for parameter in parameters:
            parameter.requires_grad_(True)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        if trainer.optimizers and (missing := [one for one in parameters if id(one) not in trained]):
            rate: dict[str, Any] = {} if self.lr is None else {"lr": self.lr}
            trainer.optimizers[0].add_param_group({"params": missing, **rate})

    def _parameters(self, module: "TrainingModule") -> list[nn.Parameter]:
        try:
            layers = [module.get_submodule(name) for name in self.layers]
        except AttributeError as error:
            raise UserError(f"Unfreeze: {type(module).__name__} has no such layer: {error}") from None
        return [*dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())]
