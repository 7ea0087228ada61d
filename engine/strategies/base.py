"""`Strategy`, the base class of strategies: how one module trains on many devices."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.torch_internals import is_on
from midstride.engine.strategies.collective import Collective, SingleProcess
from midstride.engine.strategies.layer_faults import max_norm_errors, sparse_tensor_errors
from midstride.engine.strategies.step import StepName, StepScope, TrainingStep
from midstride.engine.world import World

__all__ = ["Strategy"]


class Strategy(ABC):
    """Trains one module on many devices. Three methods are abstract; others have defaults.

    A strategy never starts processes (a launcher does), never writes files (snapshots do), never reads the environment
    (`World` does), and does not know the Trainer (`StepScope` provides the needed parts). Its `Collective` exchanges
    everything but gradients. Abilities that only some strategies have are classes in `mixins`. The constructor takes
    `strategy_args`.

    Args:
        collective: how the ranks meet and exchange values; by default that of a single process.
    """

    #: its row in `midstride.engine.config.strategies.STRATEGIES`; a derived class inherits it
    name: ClassVar[str]

    def __init__(self, collective: Collective | None = None) -> None:
        self.collective = SingleProcess() if collective is None else collective
        self.world = World()
        self.devices: Sequence[torch.device] = [torch.device("cpu")]

    def attach(self, world: World, devices: Sequence[torch.device]) -> None:
        """Set the world, and the devices of this rank: several where one process splits its batches."""
        self.world, self.devices = world, devices

    @property
    def device(self) -> torch.device:
        """The device of batches and weights; some strategies set it in `init_process_group`."""
        return self.devices[0]

    @property
    def identity(self) -> str:
        """Name of the strategy, or import path of a user's class, which affects the bits of a run."""
        kind = type(self)
        ours = kind.__module__.startswith("midstride.")
        return self.name if ours else f"{kind.__module__}:{kind.__qualname__}"

    @property
    def data_world(self) -> World:
        """Ranks that share the samples. Those with the same samples have the same rank here."""
        return self.world

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on parts of `module` that this strategy does not support."""
        if self.world.size > 1 and isinstance(self.collective, SingleProcess):
            name = type(self).__name__
            return [
                f"{name} has the collective of a single process, and this world has {self.world.size} processes: write "
                f"super().__init__(TorchCollective()) in {name}.__init__"
            ]
        samples_apart = self.data_world.size > 1
        sparse = sparse_tensor_errors(module) if samples_apart or self.world.size > 1 else []
        return sparse + (max_norm_errors(module) if samples_apart else [])

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return messages on settings of a fit that this strategy does not support.

        Args:
            optimizers: those that `configure_optimizers` returned.
            options: those of the Trainer.
            batch_size: samples in a training batch of this rank; None where batches have no fixed size.
        """
        return []

    def init_process_group(self) -> None:
        """Connect this rank to the others, before anything else. A second call does nothing."""
        self.collective.init_process_group(self.world, self.device)

    def setup_module(
        self, module: TrainingModule, scope: StepScope, first_batch: Callable[[], Any] | None = None
    ) -> None:
        """Move `module`, or this rank's part of it, to its device, before optimizers exist.

        Args:
            module: the whole module on the host, or as an earlier call left it.
            scope: the context in which the module's steps run.
            first_batch: reads the first training batch, for a strategy that measures; None in an evaluation.
        """
        if not is_on(module, self.device):
            module.to(self.device)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Change the results of `configure_optimizers` before their state is loaded."""

    @abstractmethod
    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` wrapped for training; `step.module` stays the user's module.

        Args:
            step: a module whose forward is the user's `training_step`.
            one_backward: whether there is one optimizer, stepped by the engine. Gradients can then be exchanged while
                the backward pass runs; otherwise `reduce_gradients` is called after each backward pass.
        """

    def step_call(self, scope: StepScope, module: TrainingModule, name: StepName) -> Callable[..., Any]:
        """Return a function that calls a step of the user's and returns its outputs.

        Its arguments are this rank's batch and other arguments of the step, such as `batch_idx`. A training step is
        called inside the module from `wrap`.

        Args:
            scope: calls the step.
            module: the user's module.
            name: the step to call.
        """
        return partial(scope.call, module, name)

    @abstractmethod
    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average gradients of `parameters` over ranks, unless the backward pass already has."""

    @abstractmethod
    def is_replicated(self, path: str) -> bool:
        """Return True if the tensor at `path` is equal on all ranks, so that one rank writes it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decides the bits of sums over ranks, such as their order."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the result of `state_dict`, after `wrap` and before all other parts."""

    def clone(self) -> Self:
        """Return a copy for loading a state while this one trains, without collective calls."""
        return copy.copy(self)
