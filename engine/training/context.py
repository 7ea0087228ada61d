"""The context of one call of a Trainer: the objects that its loop uses, complete before the loop starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from midstride.engine.modules.hooks import Hooks
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.module_state import TrainingModes
from midstride.engine.modules.progress import Progress
from midstride.engine.optim.precision import Precision
from midstride.engine.optim.schedulers import SchedulerConfig
from midstride.engine.seeds import DeviceGenerator
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.session.requests import SignalRequests
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.mixins import LazyDevice, ModelParallel, device_generator, lanes_of
from midstride.engine.strategies.step import StepScope
from midstride.engine.training.finite_losses import FiniteLosses
from midstride.engine.training.reporter import Reporter
from midstride.engine.training.sample_log import SampleLog
from midstride.engine.world import World

__all__ = ["EvaluationContext", "FitContext", "TrainerSettings"]


@dataclass(frozen=True)
class TrainerSettings:
    """The validated arguments of a Trainer, except those that choose its devices.

    Args:
        options: how long and how the module trains.
        snapshots: when snapshots are taken; None takes none.
        seed: seed of `seed_everything` and of the order of samples.
        accept_change: keys of the run's identity that may differ from its snapshot.
        identity: further entries of the run's identity.
        loggers: trackers that get the metric log.
        global_batch_size: samples in a training batch over all ranks; None leaves it to the loader's `batch_size`.
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
    """The objects that one evaluation or prediction uses; `FitContext` adds those of a fit.

    Args:
        trainer: passed to hooks and callbacks.
        settings: arguments of the Trainer.
        strategy: how the module runs on its devices; its process group is initialized.
        device: device that batches are moved to.
        callbacks: those of the Trainer and of the module.
        heartbeat: tells the launcher's watchdog that this rank makes progress.
        reporter: tells the launcher, or the terminal, what happens.
        requests: requests from outside to stop or to take a snapshot.
        faults: faults that a test injects, or None.
        module: on its device and in its precision.
        modes: `train()` or `eval()` of the module and each of its submodules.
        precision: precision of the module.
        metric_logger: collects the values that `self.log` gets.
        scope: runs the steps of the module, with autocast and logging.
        hooks: the hooks that the module and callbacks define.
        progress: counts of the run; outside a fit, those of the evaluation.
        finite_losses: checks that training losses are finite.
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
        """How long and how the module trains."""
        return self.settings.options

    @property
    def world(self) -> World:
        """The rank of this process, and the number of all ranks."""
        return self.strategy.world

    @property
    def collective(self) -> Collective:
        """The collective by which ranks exchange values."""
        return self.strategy.collective

    @property
    def lanes(self) -> Lanes | None:
        """The lanes that batches are split into; None for a run without lanes."""
        return lanes_of(self.strategy)

    @property
    def generator(self) -> DeviceGenerator | None:
        """The random number generator of a device outside torch, such as XLA's; None for any other."""
        return device_generator(self.strategy)

    @property
    def forward_is_collective(self) -> bool:
        """Whether a call of the module is a collective, which a rank without a batch must join."""
        return isinstance(self.strategy, ModelParallel) and self.strategy.forward_is_collective

    def mark_step(self) -> None:
        """Execute the operations that a lazy device, such as XLA's, has recorded; do nothing on other devices."""
        if isinstance(self.strategy, LazyDevice):
            self.strategy.mark_step()

    def inject_fault(self, phase: str, step: int | None = None) -> None:
        """Inject the fault that is planned for this phase and step, if any; `step` defaults to the current one."""
        if self.faults is not None:
            self.faults.at(self.world.rank, self.progress.step if step is None else step, phase)

    def faults_at(self, phase: str) -> Sequence[Callable[..., None]]:
        """Return functions that a loop calls at `phase` to inject faults; empty if no faults are planned."""
        return [] if self.faults is None else [lambda *_: self.inject_fault(phase)]


@dataclass(frozen=True)
class FitContext(EvaluationContext):
    """The objects that one fit uses.

    Args:
        loaders: the training loader and the validation loaders.
        source: object that the loaders come from: a DataModule, the module, or the loaders as they were given.
        samples: log of the samples that were trained on.
        optimizers: optimizers that `configure_optimizers` returned.
        schedulers: learning rate schedulers, with their interval and frequency.
        step: the training step as wrapped by the strategy.
    """

    loaders: FitLoaders
    source: object
    samples: SampleLog
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    step: nn.Module
