"""The Trainer's interface for modules, hooks and callbacks, below the Trainer, for types."""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.modules.progress import Progress
from midstride.engine.optim.schedulers import SchedulerConfig
from midstride.engine.session.ending import Ending
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.world import World

if TYPE_CHECKING:
    from midstride.engine.modules.callbacks import Callback, FixedCallbacks
    from midstride.engine.modules.module import DataModule, TrainingModule

__all__ = ["TrainerInterface"]


class TrainerInterface(Protocol):
    """The Trainer as `module.trainer` and as first argument of a callback's hooks.

    Names follow Lightning's.

    Attributes are for reading; changes are made by methods.
    """

    #: whether a fit is running; False in an evaluation outside a fit, which changes no monitor
    is_fitting: bool
    #: the current or last call, such as "fit"; "" before the first
    verb: str
    #: "initializing" before the first call, then "running", and "finished" or "interrupted" after it
    status: str
    #: the arguments of this Trainer, by name
    arguments: dict[str, Any]
    #: the loaders of the current or last call as they were given, by stage
    given_loaders: Mapping[str, Any]
    #: tells the launcher that this rank makes progress
    heartbeat: Heartbeat
    #: folder or URL of the run fitted last; None without a run
    run_url: str | None
    #: the callbacks given to the Trainer, and those that the module configures
    callbacks: "FixedCallbacks"
    #: pairs of a given callback and the one to call: itself, or the counterpart of one of Lightning's, or None
    callback_pairs: "list[tuple[Any, Callback | None]]"

    @abstractmethod
    def set_by_users(self) -> dict[str, Any]:
        """Return the attributes that user code has set on the Trainer: they are part of snapshots."""

    @property
    @abstractmethod
    def world(self) -> World:
        """The rank of this process, and the number of all ranks."""

    @property
    @abstractmethod
    def options(self) -> TrainerOptions:
        """Options of the training as given to the Trainer, such as `max_epochs` and `precision`."""

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """The counts of the run; in an evaluation outside a fit, those of the evaluation."""

    @property
    @abstractmethod
    def metric_logger(self) -> MetricLogger:
        """The values logged by `self.log`."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """The precision in which the module computes, by Lightning's name, such as "bf16-mixed"."""

    @property
    @abstractmethod
    def optimizers(self) -> list[Optimizer]:
        """Optimizers from `configure_optimizers`; empty before. `on_fit_start` can set others."""

    @optimizers.setter
    @abstractmethod
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None: ...

    @property
    @abstractmethod
    def schedulers(self) -> list[SchedulerConfig]:
        """The learning rate schedulers, each with its interval and frequency."""

    @property
    @abstractmethod
    def module(self) -> "TrainingModule":
        """The module that is trained or evaluated."""

    @property
    @abstractmethod
    def datamodule(self) -> "DataModule | None":
        """The DataModule of the call; None without one."""

    @property
    @abstractmethod
    def train_dataloader(self) -> Any:
        """The training loader, or nest of loaders, as given; None before the fit reads batches."""

    @property
    @abstractmethod
    def val_dataloaders(self) -> Any:
        """The validation loaders of a call as they were given; None without any."""

    @property
    @abstractmethod
    def num_training_batches(self) -> int | None:
        """Training batches of an epoch on this rank; None if the loader has no length."""

    @property
    @abstractmethod
    def num_val_batches(self) -> list[int | None]:
        """Batches of each validation loader on this rank; None for a loader without a length."""

    @property
    @abstractmethod
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""

    @abstractmethod
    def gather(self, value: object) -> list[Any]:
        """Return the `value` of each rank in order of ranks. Call it on all ranks at the same point."""

    @abstractmethod
    def clip_gradients(self, optimizer: Optimizer, largest: float, algorithm: Literal["norm", "value"]) -> None:
        """Clip the gradients of `optimizer` to the norm `largest`, or each element to this value."""

    @abstractmethod
    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of `loss` and average the module's gradients over the ranks.

        Args:
            loss: a tensor of one number.
            options: for `Tensor.backward`, such as `retain_graph`.

        Raises:
            LossNotFinite: the loss is infinite or NaN.
        """

    @abstractmethod
    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Call `closure`, `on_before_optimizer_step` and `optimizer.step`, and return its result.

        Args:
            optimizer: one of `optimizers`.
            closure: computes the gradients; None if they are computed.
            options: for `optimizer.step`.
        """

    @abstractmethod
    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Write the module's weights to `folder` of the run, if it has one. Call it on all ranks."""

    @abstractmethod
    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = True) -> None:
        """Write a checkpoint for `load_from_checkpoint` of a LightningModule. Call it on all ranks.

        Args:
            filepath: path of the file.
            weights_only: has no effect: a run resumes from its snapshots.
        """

    @abstractmethod
    def stop(self, ending: Ending | None = None) -> None:
        """End the fit normally after the current batch. Call it on all ranks at the same point.

        Args:
            ending: why, for reports; by default that a callback stopped it.
        """

    @property
    @abstractmethod
    def callback_metrics(self) -> dict[str, float]:
        """The newest logged values by name, the same on every rank."""

    @property
    @abstractmethod
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole fit, for schedules; infinite if unknown."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """Epochs completed."""

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Optimizer steps taken."""

    @property
    @abstractmethod
    def global_rank(self) -> int:
        """The rank of this process."""

    @property
    @abstractmethod
    def local_rank(self) -> int:
        """The rank of this process on its machine."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    @abstractmethod
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
