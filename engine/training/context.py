"""What one call of a Trainer works with: made whole before its loop starts, and set from nowhere else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from midstride.engine.config.loggers import LoggerOptions
from midstride.engine.config.options import SnapshotOptions, TrainerOptions
from midstride.engine.data.loader import FitLoaders
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.lanes import Lanes
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.hooks import Hooks, own_hook
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import TRANSFER_HOOKS, TrainingModule
from midstride.engine.modules.module_state import TrainingModes
from midstride.engine.modules.progress import Progress
from midstride.engine.optim.optimizers import SchedulerConfig
from midstride.engine.optim.precision import Precision
from midstride.engine.seeds import DeviceGenerator
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.session.signals import SignalRequests
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.mixins import LazyDevice, ModelParallel, device_generator, lanes_of
from midstride.engine.strategies.step import StepScope
from midstride.engine.training.batch_stream import BatchStream
from midstride.engine.training.finite import FiniteLosses
from midstride.engine.training.reporter import Reporter
from midstride.engine.training.sample_log import SampleLog
from midstride.engine.trees import move
from midstride.engine.world import World

__all__ = ["EvaluationContext", "FitContext", "TrainerSettings"]


@dataclass(frozen=True)
class TrainerSettings:
    """What a Trainer was given, checked.

    Args:
        options: how is trained.
        snapshots: when the whole state is written; None for never.
        seed: of everything random.
        accept_change: keys of a run's identity that may differ from its snapshot's.
        identity: what else makes a run this run.
        loggers: trackers that get the metric log.
        global_batch_size: samples of a training batch over all ranks; None as the loaders have it.
    """

    options: TrainerOptions
    snapshots: SnapshotOptions | None
    seed: int
    accept_change: Sequence[str]
    identity: Mapping[str, Any]
    loggers: Sequence[LoggerOptions] = ()
    global_batch_size: int | None = None


@dataclass(frozen=True)
class EvaluationContext:
    """What an evaluation or a prediction works with; a fit adds to it.

    Args:
        trainer: what hooks and callbacks are given.
        settings: of the Trainer.
        strategy: which has met the other ranks.
        device: that batches come to.
        callbacks: of the Trainer.
        heartbeat: by which the launcher sees this rank.
        reporter: by which it hears of the run.
        requests: to stop or to take a snapshot, from outside.
        faults: that are injected here, in tests.
        module: on its device, in its precision.
        modes: of the module and those in it.
        precision: that the module computes in.
        metric_logger: what `self.log` is given.
        scope: of the module's steps.
        hooks: of the module and the callbacks.
        progress: where the run, or an evaluation on its own, stands.
        finite_losses: looks at the losses of training.
    """

    trainer: TrainerInterface
    settings: TrainerSettings
    strategy: Strategy
    device: torch.device
    callbacks: Sequence[Callback]
    heartbeat: Heartbeat
    reporter: Reporter
    requests: SignalRequests
    faults: FaultPlan | None
    module: TrainingModule
    modes: TrainingModes
    precision: Precision
    metric_logger: MetricLogger
    scope: StepScope
    hooks: Hooks
    progress: Progress
    finite_losses: FiniteLosses

    @property
    def options(self) -> TrainerOptions:
        """How is trained."""
        return self.settings.options

    @property
    def world(self) -> World:
        """Where this process stands among all ranks."""
        return self.strategy.world

    @property
    def collective(self) -> Collective:
        """What the ranks exchange values through."""
        return self.strategy.collective

    @property
    def lanes(self) -> Lanes | None:
        """The lanes in which batches are run; None without."""
        return lanes_of(self.strategy)

    @property
    def generator(self) -> DeviceGenerator | None:
        """The device's generator, where torch's own functions do not reach it."""
        return device_generator(self.strategy)

    @property
    def forward_is_collective(self) -> bool:
        """Whether a rank without a batch has to join in the steps of others."""
        return isinstance(self.strategy, ModelParallel) and self.strategy.forward_is_collective

    def mark_step(self) -> None:
        """Have carried out what the device has collected, where it does."""
        if isinstance(self.strategy, LazyDevice):
            self.strategy.mark_step()

    def batch_transfer(self, loader: int = 0) -> Callable[[Any], Any]:
        """Return what brings batches, of the loader of that number, to this rank's device and the module's width.

        The hooks are looked up here, once: a module that is asked for one that it lacks takes microseconds to say so.
        """
        before, moved, after = (self._transfer_hook(name) for name in TRANSFER_HOOKS)
        device, converted = self.device, self.precision.batch
        if before is moved is after is None and device.type == "cpu":
            return converted

        to_device = BatchStream(device).move if device.type == "cuda" else partial(move, device=device)

        def transfer(batch: Any) -> Any:
            batch = batch if before is None else before(batch, loader)
            batch = to_device(batch) if moved is None else moved(batch, device, loader)
            batch = batch if after is None else after(batch, loader)
            return converted(batch)

        return transfer

    def to_device(self, batch: Any, loader: int = 0) -> Any:
        """Return `batch`, of the loader of that number, on this rank's device, in the width the module trains in."""
        return self.batch_transfer(loader)(batch)

    def _transfer_hook(self, name: str) -> Callable[..., Any] | None:
        """Return the hook called `name` of the data, or else of the module, if either has it."""
        for owner in (self.trainer.datamodule, self.module):
            if (hook := own_hook(owner, name)) is not None:
                return hook
        return None

    def inject_fault(self, phase: str, step: int | None = None) -> None:
        """Let an injected fault strike here; `step` if it is not that of the progress."""
        if self.faults is not None:
            self.faults.at(self.world.rank, self.progress.step if step is None else step, phase)

    def faults_at(self, phase: str) -> Sequence[Callable[..., None]]:
        """Return what a loop calls at `phase`, as it calls hooks: a fault that may be injected there, or nothing."""
        return [] if self.faults is None else [lambda *_: self.inject_fault(phase)]


@dataclass(frozen=True)
class FitContext(EvaluationContext):
    """What a fit works with.

    Args:
        loaders: the training batches, and those of validation.
        source: the DataModule, the module or the loaders that they are read from.
        samples: what has been trained on.
        optimizers: that `configure_optimizers` returned.
        schedulers: of them.
        step: the training step, wrapped by the strategy.
    """

    loaders: FitLoaders
    source: object
    samples: SampleLog
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    step: nn.Module
