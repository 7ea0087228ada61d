"""Context of one call of a Trainer: the objects of its loop, complete before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from midstride.engine.checkpointing.context import RunContext
from midstride.engine.checkpointing.sample_log import SampleLog
from midstride.engine.data.loader import FitLoaders
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.hooks import Hooks
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.module_state import TrainingModes
from midstride.engine.optim.precision import Precision
from midstride.engine.optim.schedulers import SchedulerConfig
from midstride.engine.strategies.mixins import ModelParallel
from midstride.engine.strategies.step import StepScope

__all__ = ["EvaluationContext", "FitContext"]


@dataclass(frozen=True)
class EvaluationContext(RunContext):
    """Objects of one evaluation or prediction; `FitContext` adds those of a fit.

    Args:
        trainer: passed to hooks and callbacks.
        callbacks: those of the Trainer and of the module.
        module: on its device and in its precision.
        modes: `train()` or `eval()` of the module and each of its submodules.
        precision: precision of the module.
        scope: runs the steps of the module, with autocast and logging.
        hooks: the hooks that the module and callbacks define.
    """

    trainer: TrainerInterface
    callbacks: Sequence[Callback]
    module: TrainingModule
    modes: TrainingModes
    precision: Precision
    scope: StepScope
    hooks: Hooks

    @property
    def forward_is_collective(self) -> bool:
        """Whether a call of the module is a collective, which a rank without a batch must join."""
        return isinstance(self.strategy, ModelParallel) and self.strategy.forward_is_collective


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
