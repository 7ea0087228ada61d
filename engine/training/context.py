"""What one call of a Trainer works with: made whole before its loop starts, and set from nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from midstride.engine.config.options import SnapshotOptions, TrainerOptions
from midstride.engine.data.loader import FitLoaders
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.metrics.logger import Logged
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.hooks import Hooks
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.module_state import Modes
from midstride.engine.modules.progress import Progress
from midstride.engine.optim.optimizers import SchedulerConfig
from midstride.engine.optim.precision import Precision
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.session.signals import SignalRequests
from midstride.engine.strategies.base import Strategy
from midstride.engine.training.reporter import Reporter
from midstride.engine.training.sample_log import SampleAccount
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
    """

    options: TrainerOptions
    snapshots: SnapshotOptions | None
    seed: int
    accept_change: Sequence[str]
    identity: Mapping[str, Any]


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
        logged: what `self.log` is given.
        hooks: of the module and the callbacks.
        progress: where the run, or an evaluation on its own, stands.
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
    modes: Modes
    precision: Precision
    logged: Logged
    hooks: Hooks
    progress: Progress

    @property
    def options(self) -> TrainerOptions:
        """How is trained."""
        return self.settings.options

    @property
    def world(self) -> World:
        """Where this process stands among all ranks."""
        return self.strategy.world

    def to_device(self, batch: Any) -> Any:
        """Return `batch` on this rank's device, in the width that the module trains in."""
        return self.precision.batch(move(batch, self.device))

    def inject_fault(self, phase: str, step: int | None = None) -> None:
        """Let an injected fault strike here; `step` if it is not that of the progress."""
        if self.faults is not None:
            self.faults.at(self.world.rank, self.progress.step if step is None else step, phase)


@dataclass(frozen=True)
class FitContext(EvaluationContext):
    """What a fit works with.

    Args:
        feeds: the training batches, and those of validation.
        source: the DataModule, the module or the loaders that they are read from.
        samples: what has been trained on.
        optimizers: that `configure_optimizers` returned.
        schedulers: of them.
        step: the training step, wrapped by the strategy.
    """

    feeds: FitLoaders
    source: object
    samples: SampleAccount
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    step: nn.Module
