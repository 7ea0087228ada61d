"""What a module, its hooks and its callbacks may use of the Trainer that runs them."""

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.modules.progress import Progress
from midstride.engine.optim.optimizers import SchedulerConfig
from midstride.engine.optim.precision import Precision
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.world import World

if TYPE_CHECKING:
    from midstride.engine.modules.callbacks import Callback, FixedCallbacks
    from midstride.engine.modules.module import DataModule, TrainingModule

__all__ = ["TrainerInterface"]


class TrainerInterface(Protocol):
    """A Trainer, as `module.trainer` and the first argument of a callback's hooks; names follow Lightning's.

    Everything is for reading; what may be changed has a method.
    """

    #: whether a fit is under way; False in an evaluation on its own, which moves no monitor
    is_fitting: bool
    #: by which the launcher sees this rank
    heartbeat: Heartbeat
    #: folder or URL of the run that was fitted last; None if it is not kept
    run_url: str | None
    #: what acts beside the module: those that the Trainer was given, and the module's own
    callbacks: "FixedCallbacks"
    #: pairs of a given callback and the one that is called: itself, or the counterpart of one of Lightning's, or None
    callback_pairs: "list[tuple[Any, Callback | None]]"

    @abstractmethod
    def set_by_users(self) -> dict[str, Any]:
        """Return the attributes that user code has set on the Trainer: they are part of snapshots."""

    @property
    @abstractmethod
    def world(self) -> World:
        """Where this process stands among all ranks."""

    @property
    @abstractmethod
    def options(self) -> TrainerOptions:
        """How long and how the module trains: `max_epochs`, `precision` and so on, as the Trainer was given them."""

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """The counts of the run; in an evaluation on its own, those of that evaluation."""

    @property
    @abstractmethod
    def metric_logger(self) -> MetricLogger:
        """The values logged by `self.log`."""

    @property
    @abstractmethod
    def precision(self) -> Precision:
        """The precision in which the module computes."""

    @property
    @abstractmethod
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that `configure_optimizers` returned; empty before. `on_fit_start` may set others."""

    @optimizers.setter
    @abstractmethod
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None: ...

    @property
    @abstractmethod
    def schedulers(self) -> list[SchedulerConfig]:
        """The learning rate schedulers, each with when it steps."""

    @property
    @abstractmethod
    def module(self) -> "TrainingModule":
        """The module that is trained or evaluated."""

    @property
    @abstractmethod
    def datamodule(self) -> "DataModule | None":
        """The DataModule that is read, if there is one."""

    @property
    @abstractmethod
    def train_dataloader(self) -> Any:
        """The training loader as it was given: a DataLoader or a nest of them; None before a fit has begun to read."""

    @property
    @abstractmethod
    def val_dataloaders(self) -> Any:
        """The validation loaders of a fit as they were given; None without any."""

    @property
    @abstractmethod
    def num_training_batches(self) -> int | None:
        """Training batches of an epoch on this rank; None where the loader has no length."""

    @property
    @abstractmethod
    def num_val_batches(self) -> list[int | None]:
        """Batches of each validation loader on this rank; None where it has no length."""

    @property
    @abstractmethod
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""

    @abstractmethod
    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks; every rank calls this at the same point."""

    @abstractmethod
    def clip_gradients(self, optimizer: Optimizer, largest: float, algorithm: Literal["norm", "value"]) -> None:
        """Clip the gradients of the parameters of `optimizer` to the norm `largest`, or each element to this value."""

    @abstractmethod
    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of `loss` and average the module's gradients over the ranks.

        Args:
            loss: of one number.
            options: for `Tensor.backward`, such as `retain_graph`.

        Raises:
            LossNotFinite: the loss is infinite or NaN.
        """

    @abstractmethod
    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Call `closure`, the hooks `on_before_optimizer_step`, then `optimizer.step`; return what that returns.

        Args:
            optimizer: one of `optimizers`.
            closure: computes gradients, if they were not computed before.
            options: for `optimizer.step`.
        """

    @abstractmethod
    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Write the module's weights to `folder` of the run, if the run is stored; every rank calls this."""

    @abstractmethod
    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = True) -> None:
        """Write the weights to one file that `load_from_checkpoint` of a LightningModule takes; on every rank.

        Args:
            filepath: of the file.
            weights_only: False is understood and changes nothing: a run resumes from its snapshots.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the fit at the next boundary, as if it were complete; every rank calls this at the same point."""

    @property
    @abstractmethod
    def callback_metrics(self) -> dict[str, float]:
        """The newest logged values by name, the same on every rank."""

    @property
    @abstractmethod
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole fit, for schedules of the learning rate; infinite if the number is unknown."""

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
