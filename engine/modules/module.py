"""Base classes for users: a module that trains, and its data. Names follow Lightning's."""

import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.errors import UserError
from midstride.engine.modules.compiled import compile_layers_in_place
from midstride.engine.modules.hyperparameters import (
    Hyperparameters,
    HyperparametersMixin,
    accepted_arguments,
    ensure_accepted,
)
from midstride.engine.modules.module_hooks import ModuleHooks
from midstride.engine.modules.quantized import load_weights, weights_of
from midstride.engine.trees import convert

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = [
    "LOADERS",
    "MODE_HOOKS",
    "STEP_HOOKS",
    "TRANSFER_HOOKS",
    "DataModule",
    "TrainingModule",
    "attach",
    "ensure_module",
    "has_step",
    "set_device",
]

log = logging.getLogger(__name__)

#: methods by which a module does a part of the step itself; see docs/module.md
STEP_HOOKS = ("backward", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad")
#: methods by which a DataModule, or else a module, changes a batch on its way to the device
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
#: methods that set the training modes of an evaluation, and those after it, in place of `eval()` and the modes before
MODE_HOOKS = tuple(
    f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")
)
#: methods that return loaders
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


class TrainingModule(ModuleHooks, HyperparametersMixin, nn.Module):
    """An `nn.Module` that knows how to train itself.

    Write `training_step` and `configure_optimizers`; to validate, test or predict, also `validation_step`,
    `test_step` or `predict_step`.
    """

    #: False: `training_step` calls `self.manual_backward(loss)` and steps `self.optimizers()` itself
    automatic_optimization: bool = True
    #: attributes that belong to the engine and are not part of snapshots
    not_state: frozenset[str] = frozenset()
    #: parameters of other optimizers, which collect no gradients until `untoggle_optimizer`
    _toggled_off: tuple[nn.Parameter, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.hparams = Hyperparameters()
        self.device = torch.device("cpu")
        self._trainer: list[TrainerInterface] = []  # in a list, so that nn.Module leaves it alone

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle: all but the Trainer."""
        return {name: value for name, value in vars(self).items() if name != "_compiled_call_impl"} | {"_trainer": []}

    # Written by users ---------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss (a tensor of one number), or a dict that holds it as "loss".

        With several automatic optimizers it is called once for each, with `optimizer_idx` as third argument.
        """
        raise UserError(f"{type(self).__name__} has no training_step: write one that returns the loss")

    def configure_optimizers(self) -> Any:
        """Return an optimizer, (optimizers, schedulers), or {"optimizer": ..., "lr_scheduler": ...}."""
        raise UserError(f"{type(self).__name__} has no configure_optimizers: write one that returns an optimizer")

    def configure_callbacks(self) -> Any:
        """Return a callback or a list of them: each replaces the Trainer's callbacks of its class."""
        return []

    def training_step_end(self, outputs: Any) -> Any:
        """Turn the outputs of `training_step` into the loss; called with every strategy."""
        return outputs

    def validation_step_end(self, outputs: Any) -> Any:
        """Change the outputs of `validation_step`."""
        return outputs

    def test_step_end(self, outputs: Any) -> Any:
        """Change the outputs of `test_step`."""
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Log values of a validation batch. With several loaders, the third argument is their index."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Log values of a test batch; with several loaders, the third argument is `dataloader_idx`."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the prediction for `batch`, by default `self(batch)`, from loader `dataloader_idx`."""
        return self(batch)

    # Called by users ----------------------------------------------------------------------------

    @property
    def trainer(self) -> "TrainerInterface":
        """The Trainer that runs this module."""
        if not self._trainer:
            raise RuntimeError(f"{type(self).__name__} has no Trainer: call Trainer(...).fit(module) first")
        return self._trainer[0]

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.trainer.global_step

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.trainer.global_rank

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        sync_dist: bool = False,
        reduce_fx: str = "mean",
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
    ) -> None:
        """Log a number, a one-number tensor or a torchmetrics metric. Without a Trainer, do nothing.

        Args:
            name: such as "train/loss".
            value: the value to log.
            on_step: log the value of this batch; the default in training steps and their hooks. With on_epoch too,
                the names get the endings "_step" and "_epoch". For a metric it is the value of the batch alone.
            on_epoch: log one value for the epoch; the default in hooks of an epoch, and while validating and testing.
            prog_bar: show the value in the progress bar of the training in place of the loss. The values of a
                validation are always shown.
            sync_dist: reduce the value over the ranks; metrics always are.
            reduce_fx: how the values of batches are reduced: mean (weighted by samples), sum, min or max.
            batch_size: samples in this batch; by default those that the loader put into it, or the length of its first
                tensor if the data set gives whole batches.
            add_dataloader_idx: with several loaders, log a value for each: "val/loss/dataloader_idx_1". False: one
                value over all loaders.
        """
        trainers = self._trainer
        if not trainers:
            _warn_of_no_trainer(type(self).__name__)
            return
        logged = trainers[0].metric_logger
        if logged.is_recording:
            asked = (name, on_step, on_epoch, prog_bar, sync_dist, reduce_fx, add_dataloader_idx)
            logged.log(asked, value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *given: Any, **options: Any) -> None:
        """Log several values with the same options."""
        for name, value in dictionary.items():
            self.log(name, value, *given, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only; without a Trainer, always. Arguments are those of Python's `print`."""
        if not self._trainer or self.trainer.is_global_zero:
            print(*args, **kwargs)

    def all_gather(self, data: Any) -> Any:
        """Return `data`, a tensor or nest, stacked over the ranks; unchanged on one process.

        Tensors have a first dimension of `world_size` more, and no gradients. Every rank calls this at the same point.
        """
        trainer = self.trainer
        if trainer.world_size == 1:
            return data
        return convert(data, lambda tensor: torch.stack([*trainer.gather(tensor.detach())]))

    def freeze(self) -> None:
        """Stop collecting gradients for all parameters, and put all layers into eval mode."""
        self.requires_grad_(False).eval()

    def unfreeze(self) -> None:
        """Undo `freeze`: all parameters collect gradients, and all layers are in training mode."""
        self.requires_grad_(True).train()

    @classmethod
    def load_from_checkpoint(cls, path: str | os.PathLike[str], **arguments: Any) -> Self:
        """Return a module with the weights at `path`.

        Args:
            path: folder or URL: a run's `best` or `last`, or a snapshot; or a file that `save_checkpoint` wrote.
            arguments: constructor arguments that override the saved ones.

        Raises:
            UserError: the class cannot be made with the arguments that were saved and given.
            SnapshotError: there are no weights, or damaged ones.
        """
        from midstride.engine.snapshots.reader import weights_at

        weights = weights_at(path)
        left_out = accepted_arguments(cls, dict.fromkeys(weights.facts.get("hparams_left_out", [])))
        if missing := [name for name in left_out if name not in arguments]:
            raise UserError(f"{path} could not keep the arguments {missing} of {cls.__name__}: pass them here.")
        given = {**accepted_arguments(cls, weights.facts.get("hparams", {})), **arguments}
        ensure_accepted(cls, given, path)
        module = cls(**given)
        compile_layers_in_place(module)
        load_weights(module, weights.complete(lambda: weights_of(module)))
        return module

    # Manual optimization, with `automatic_optimization = False` ------------------------------------

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of them, for manual optimization."""
        optimizers = self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them, or None."""
        schedulers = [config.scheduler for config in self.trainer.schedulers]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of `loss`, with options of `Tensor.backward` such as `retain_graph`.

        Gradients are averaged over the ranks.
        """
        self.trainer.backward(loss, **options)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Stop gradients of parameters that only other optimizers train, until `untoggle_optimizer`."""
        self.untoggle_optimizer(optimizer)
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = (p for other in self.trainer.optimizers for group in other.param_groups for p in group["params"])
        self._toggled_off = tuple({id(p): p for p in others if p.requires_grad and id(p) not in mine}.values())
        for parameter in self._toggled_off:
            parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Undo `toggle_optimizer(optimizer)`."""
        for parameter in self._toggled_off:
            parameter.requires_grad_(True)
        self._toggled_off = ()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of `optimizer` by "norm" or "value", by default as in the options."""
        options = self.trainer.options
        largest = options.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm: Any = gradient_clip_algorithm or options.gradient_clip_algorithm
        if largest is not None:
            self.trainer.clip_gradients(optimizer, largest, getattr(algorithm, "value", algorithm))


class DataModule(HyperparametersMixin):
    """The data of a run: their source and their loaders.

    Each stage calls `prepare_data` in one process of each machine, then `setup` in all ranks.
    """

    def prepare_data(self) -> None:
        """Download or make the data; must be idempotent."""

    def setup(self, stage: str) -> None:
        """Build data sets for `stage`: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Release resources of `setup`."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of them."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of them."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the loader to predict on, or a list of them."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return state that affects the next batches. Snapshots hold attributes anyway."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the result of `state_dict`, after the loaders exist. These resume on their own."""


@cache
def _warn_of_no_trainer(name: str) -> None:
    """Warn once per class that logged values are dropped, if a step runs without a Trainer."""
    log.warning("%s has no Trainer: values passed to self.log are dropped", name)


def has_step(module: "TrainingModule", name: str) -> bool:
    """Return whether the user has written the step `name`, and not set it to None on the object."""
    written: Any = getattr(type(module), name)
    return written is not getattr(TrainingModule, name) and getattr(module, name) is not None


def attach(owner: Any, trainer: "TrainerInterface | None") -> None:
    """Set the Trainer of `owner`, a DataModule or a module with its submodules; None removes it."""
    holder: Any
    for holder in owner.modules() if isinstance(owner, nn.Module) else [owner]:
        if holder is owner or isinstance(holder, TrainingModule):
            holder._trainer = [] if trainer is None else [trainer]


def set_device(module: TrainingModule, device: torch.device) -> None:
    """Set `module.device`; its tensors are not moved."""
    module.device = device


def ensure_module(module: object, verb: str) -> None:
    """Check the `module` that the method `verb` of a Trainer was called with.

    Raises:
        UserError: `module` is not a TrainingModule, or it is a class.
    """
    if isinstance(module, type):
        raise UserError(f"{verb} was given the class {module.__name__}: give an instance, {module.__name__}(...)")
    if not isinstance(module, TrainingModule):
        is_module = isinstance(module, nn.Module)
        way = "derive it from TrainingModule" if is_module else f"the module is first: {verb}(module, ...)"
        raise UserError(f"{verb} was given a {type(module).__name__}: {way}")
