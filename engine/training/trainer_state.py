"""The attributes and methods of a Trainer that modules, callbacks and launchers use."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.data.loader import FitLoaders
from midstride.engine.errors import UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.lightning.adapt import adapt
from midstride.engine.lightning.callbacks import with_counterparts
from midstride.engine.lightning.checkpoint import exported_checkpoint
from midstride.engine.lightning.counterparts import update_lightning_callbacks
from midstride.engine.lightning.trainer import LightningTrainer
from midstride.engine.metrics.lane_logger import LaneLogger
from midstride.engine.metrics.lane_metrics import LaneMetrics
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState
from midstride.engine.modules.callbacks import Callback, first_state, keep_first_state
from midstride.engine.modules.fixed_callbacks import FixedCallbacks
from midstride.engine.modules.hooks import Hooks, own_hook
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import DataModule, TrainingModule, attach, set_device
from midstride.engine.modules.module_state import TrainingModes
from midstride.engine.modules.progress import Progress
from midstride.engine.modules.returned_weights import structure_of, take_weights
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.optim.optimizers import SchedulerConfig
from midstride.engine.optim.precision import Precision
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.session.requests import SignalRequests
from midstride.engine.storage.draft import draft_of
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.mixins import ModelParallel, full_state_dict, gradient_buckets, lanes_of
from midstride.engine.strategies.step import StepScope
from midstride.engine.training.context import EvaluationContext, TrainerSettings
from midstride.engine.training.finite import FiniteLosses
from midstride.engine.training.fit import Fit
from midstride.engine.training.reporter import Reporter
from midstride.engine.user_code import call_user_code
from midstride.engine.world import World

__all__ = ["TrainerState"]

#: what of a logger's state a call that has ended leaves behind
_NEWEST = ("values", "names", "evaluation_values")


class TrainerState(TrainerInterface):
    """Base class of the Trainer, without `fit`, `validate`, `test` and `predict`.

    Args:
        strategy: strategy, attached to its world.
        settings: arguments of the Trainer.
        callbacks: one callback, several, or None.
    """

    def __init__(
        self, strategy: Strategy, settings: TrainerSettings, callbacks: Sequence[Callback] | Callback | None
    ) -> None:
        self.strategy, self.settings = strategy, settings
        self._given = with_counterparts(callbacks, adapt)
        #: given callbacks and those of the module of the current or last call: see `TrainerInterface`
        self.callback_pairs = self._given
        self.callbacks = FixedCallbacks(_counterparts(self._given))
        self._first_states = [first_state(callback) for callback in self.callbacks]
        self._faults, self.requests = FaultPlan.from_environment(), SignalRequests()
        self.heartbeat = Heartbeat.of(strategy.world)
        self.reporter = Reporter(strategy.world, bar=settings.options.enable_progress_bar)
        self.is_fitting = False
        self.run_url: str | None = None
        #: loaders of the current or last fit
        self.loaders: FitLoaders | None = None
        self._datamodule: DataModule | None = None
        #: the current or last fit
        self.last_fit: Fit | None = None
        #: context of the current or last call; before the first one, that of an empty module
        self.context: EvaluationContext = self._context_of(TrainingModule(), Progress())
        self._own = frozenset({*vars(self), "_own"})

    def set_by_users(self) -> dict[str, Any]:
        """Return the attributes that user code has set: they are part of snapshots."""
        return {name: value for name, value in vars(self).items() if name not in self._own}

    if not TYPE_CHECKING:  # static type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(LightningTrainer(self), name)

        def __setattr__(self, name: str, value: Any) -> None:
            is_fixed = name == "callbacks" and not isinstance(value, FixedCallbacks)
            if is_fixed or name == "should_stop" or name in TrainerOptions.model_fields:
                setattr(LightningTrainer(self), name, value)  # stops the fit, or raises an error with advice
            else:
                super().__setattr__(name, value)

    def _context_of(self, module: TrainingModule, progress: Progress) -> EvaluationContext:
        """Return the context of a call, and convert `module` to this Trainer's precision."""
        precision = Precision(self.options.precision, self.device)
        precision.convert(module)
        set_device(module, self.device)
        metric_logger = self._logger_of(module)
        return EvaluationContext(
            trainer=self,
            settings=self.settings,
            strategy=self.strategy,
            device=self.device,
            callbacks=self.callbacks,
            heartbeat=self.heartbeat,
            reporter=self.reporter,
            requests=self.requests,
            faults=self._faults,
            module=module,
            modes=TrainingModes(module),
            precision=precision,
            metric_logger=metric_logger,
            scope=StepScope(metric_logger, precision, self.heartbeat),
            hooks=Hooks(self, module, self.callbacks),
            progress=progress,
            finite_losses=FiniteLosses(progress, self.world.rank, needed=precision.name != "16"),
        )

    def _logger_of(self, module: TrainingModule) -> MetricLogger:
        gather, lanes = self.strategy.collective.gather, lanes_of(self.strategy)
        if lanes is not None:
            return LaneLogger(gather, LaneMetrics(module, gather, lanes), lanes)
        return MetricLogger(gather, TorchmetricsState(module, gather, self.world.size), self.world.size)

    # For modules, hooks and callbacks: see `TrainerInterface` -----------------------------------------

    @property
    def world(self) -> World:
        """The rank of this process, and the number of all ranks."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.strategy.device

    @property
    def options(self) -> TrainerOptions:
        """How long and how the module trains."""
        return self.settings.options

    @property
    def progress(self) -> Progress:
        """Counts of the run fitted last; during an evaluation outside a fit, those of the evaluation."""
        return self.context.progress

    @property
    def metric_logger(self) -> MetricLogger:
        """The values that `self.log` got in the current or last call."""
        return self.context.metric_logger

    @property
    def precision(self) -> Precision:
        """The precision that the module computes in."""
        return self.context.precision

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the last fit; `on_fit_start` may set others."""
        return [] if self.last_fit is None else self.last_fit.context.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers[:] = optimizers

    @property
    def schedulers(self) -> list[SchedulerConfig]:
        """The learning rate schedulers of the last fit."""
        return [] if self.last_fit is None else self.last_fit.context.schedulers

    @property
    def module(self) -> TrainingModule:
        """The module of the current or last call."""
        return self.context.module

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the current or last call; None without one."""
        return self._datamodule

    @property
    def train_dataloader(self) -> Any:
        """The training loader of the fit, as it was given."""
        return None if self.loaders is None else self.loaders.given.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders of the fit, as they were given."""
        return None if self.loaders is None else self.loaders.given.get("validate")

    @property
    def num_training_batches(self) -> int | None:
        """Training batches in an epoch; None if the number is unknown, 0 before a fit."""
        return 0 if self.loaders is None else self.loaders.training.estimated_batches

    @property
    def num_val_batches(self) -> list[int | None]:
        """Batches of each validation loader; None for an unknown number, [] before a fit."""
        return [] if self.loaders is None else [loader.estimated_batches for loader in self.loaders.validation]

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""
        return self.loaders is not None and self.loaders.training.at_end

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        return self.strategy.collective.gather(value)

    def clip_gradients(self, optimizer: Optimizer, largest: float, algorithm: Literal["norm", "value"]) -> None:
        """Clip the gradients of the parameters of `optimizer`, by norm or by value, to `largest`."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strategy = self.strategy
        by_norm = strategy.clip_gradients if isinstance(strategy, ModelParallel) else clip_grad_norm_
        clip = by_norm if algorithm == "norm" else clip_grad_value_
        clip(parameters, largest)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of `loss`, which must be finite, and average gradients over the ranks."""
        hooks, module, strategy = self.context.hooks, self.context.module, self.strategy
        self.context.finite_losses.check(loss)
        hooks.call("on_before_backward", loss)
        self.context.inject_fault("backward")
        buckets = gradient_buckets(strategy)
        with nullcontext() if buckets is None else buckets.backward(module.parameters()):
            self.precision.backward(loss, own_hook(module, "backward") or Tensor.backward, **options)
        strategy.reduce_gradients(module.parameters())
        hooks.call("on_after_backward")

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step `optimizer` in manual optimization, after `closure` and the hooks `on_before_optimizer_step`."""
        hooks = self.context.hooks
        if not hooks.has("on_before_optimizer_step"):
            return optimizer.step(**options) if closure is None else optimizer.step(closure, **options)

        def evaluated() -> Any:
            returned = None if closure is None else closure()
            hooks.call("on_before_optimizer_step", optimizer)
            return returned

        return optimizer.step(evaluated, **options)

    def save_weights(self, folder: Literal["best", "last"]) -> None:
        """Save the module's weights to `folder` of the run, in a fit with snapshots; every rank calls this."""
        if self.is_fitting and self.last_fit is not None:
            self.last_fit.save_weights(folder)

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = True) -> None:
        """Write the weights to a file that `load_from_checkpoint` of a LightningModule can read."""
        checkpoint = exported_checkpoint(self.module, full_state_dict(self.strategy, self.module))
        if self.world.is_first:
            path = Path(filepath)
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(path) as draft:
                torch.save(checkpoint, draft)

    def stop(self) -> None:
        """Request the end of the fit after the current batch or epoch; every rank calls this at the same point."""
        self.progress.request_stop()

    # For the process that starts this Trainer's ranks: see `StartsRanks` ------------------------------

    def detach(self, module: Any, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Detach `module`, so that it can be sent to ranks; return the arguments of `verb` for the ranks."""
        attach(module, None)
        if verb == "fit":
            self.reset_callbacks()
            return dict(arguments)
        folder = arguments.get("ckpt_path")
        return {**arguments, **({} if folder is None else {"ckpt_path": self.weights_url(folder)})}

    def export_result(self, built: ModuleStructure) -> dict[str, Any]:
        """Return what a call has changed, with tensors on the CPU; weights are included on rank 0 only.

        Args:
            built: structure of the module before the call; hooks and training may have added layers.
        """
        weights = self.context.module.state_dict() if self.world.is_first else {}
        return {
            "structure": structure_of(built) if self.world.is_first else {},
            "weights": {name: tensor.cpu() for name, tensor in weights.items()},
            "progress": self.progress.state_dict(),
            "logged": {name: state for name, state in self.metric_logger.state_dict().items() if name in _NEWEST},
            "callbacks": [callback.state_dict() for callback in self.callbacks],
            "run": self.run_url,
        }

    def adopt_result(self, module: Any, result: Mapping[str, Any], *, fitted: bool) -> None:
        """Restore what `export_result` returned into this Trainer and `module`; `fitted` if the call was `fit`."""
        self.precision.convert(module)
        take_weights(module, result["weights"], result["structure"])
        attach(module, self)
        self.context = replace(self.context, module=module)
        self.metric_logger.load_state_dict({**self.metric_logger.state_dict(), **result["logged"]})
        if not fitted:
            return
        self.run_url = result["run"]
        self.progress.load_state_dict(result["progress"])
        self.take_callbacks(module)
        for callback, state in zip(self.callbacks, result["callbacks"], strict=True):
            callback.load_state_dict(state)
        update_lightning_callbacks(self)

    def with_strategy(self, strategy: Strategy) -> Self:
        """Return a copy of this Trainer without a fit, with `strategy`, which is attached to a world."""
        other = copy.copy(self)
        other.strategy, other.last_fit = strategy, None
        return other

    def reset_callbacks(self) -> None:
        """Restore the states that callbacks had before their first fit."""
        for callback, state in zip(_counterparts(self._given), self._first_states, strict=True):
            keep_first_state(callback, state)
            callback.load_state_dict(copy.deepcopy(state))

    def take_callbacks(self, module: TrainingModule) -> None:
        """Add the callbacks that `module` configures; each replaces a given callback of its class."""
        where = f"{type(module).__name__}.configure_callbacks"
        configured = with_counterparts(call_user_code(where, module.configure_callbacks), adapt)
        kinds = {type(callback) for callback in _counterparts(configured)}
        self.callback_pairs = [*(pair for pair in self._given if type(pair[1]) not in kinds), *configured]
        self.callbacks = FixedCallbacks(_counterparts(self.callback_pairs))

    def weights_url(self, ckpt_path: str) -> str:
        """Return the path or URL of weights; "best" and "last" are of the run fitted last (UserError without one)."""
        if ckpt_path not in ("best", "last"):
            return ckpt_path
        if self.run_url is None:
            raise UserError(f"ckpt_path={ckpt_path!r} is a folder of a run: fit with run=... first, or give a path.")
        return f"{self.run_url.rstrip('/')}/{ckpt_path}"


def _counterparts(pairs: Sequence[tuple[Any, Callback | None]]) -> list[Callback]:
    return [callback for _, callback in pairs if callback is not None]
