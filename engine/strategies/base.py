"""What a strategy is: how one module trains on many devices."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.modules.module import TrainingModule
from midstride.engine.strategies.collective import Collective, SingleProcess
from midstride.engine.strategies.layer_faults import max_norm_errors, sparse_tensor_errors
from midstride.engine.strategies.step import StepName, StepScope, TrainingStep
from midstride.engine.world import World

__all__ = ["Strategy"]


class Strategy(ABC):
    """How one module trains on many devices. Three methods are an author's to write, the others have defaults.

    A strategy never starts processes (that is a launcher), never writes files (that is a snapshot), never reads the
    environment (that is `World`), and never asks for the Trainer (what it needs of it is a `StepScope`). What the
    ranks exchange beside gradients is its `Collective`. `mixins` has what only some strategies need. Its constructor
    takes `strategy_args`.

    Args:
        collective: through which the ranks meet; by default there is one rank.
    """

    #: its row in `midstride.engine.config.strategies.STRATEGIES`; what is made from a class keeps that class's row
    name: ClassVar[str]

    def __init__(self, collective: Collective | None = None) -> None:
        self.collective = SingleProcess() if collective is None else collective
        self.world = World()
        self.devices: Sequence[torch.device] = [torch.device("cpu")]

    def attach(self, world: World, devices: Sequence[torch.device]) -> None:
        """Belong to `world`; this rank has `devices`, more than one where a process splits its batches."""
        self.world, self.devices = world, devices

    @property
    def device(self) -> torch.device:
        """The device that batches come to and weights live on; some know it once they have met."""
        return self.devices[0]

    @property
    def identity(self) -> str:
        """What of the strategy decides a run's bits, as text; a class of a user's own goes by its import path."""
        kind = type(self)
        ours = kind.__module__.startswith("midstride.")
        return self.name if ours else f"{kind.__module__}:{kind.__qualname__}"

    @property
    def data_world(self) -> World:
        """The world that samples are dealt to: ranks that read the same ones have one rank in it."""
        return self.world

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on what `module` wants and this strategy cannot do."""
        samples_apart = self.data_world.size > 1
        sparse = sparse_tensor_errors(module) if samples_apart or self.world.size > 1 else []
        return sparse + (max_norm_errors(module) if samples_apart else [])

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return messages on what of a fit that is put together this strategy cannot do.

        Args:
            optimizers: that the engine steps.
            options: of the Trainer.
            batch_size: of training, on this rank; None where batches have no fixed size.
        """
        return []

    def init_process_group(self) -> None:
        """Meet the other ranks; called once, before anything else. Calling it again does nothing."""
        self.collective.init_process_group(self.world, self.device)

    def setup_module(
        self, module: TrainingModule, scope: StepScope, first_batch: Callable[[], Any] | None = None
    ) -> None:
        """Bring `module` to where it trains, or as much of it as this rank has; optimizers are made after it.

        Args:
            module: whole, on the host; or as an earlier call left it.
            scope: of its steps.
            first_batch: reads the first training batch, for a strategy that measures; None where nothing is trained.
        """
        module.to(self.device)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Change what `configure_optimizers` returned, torch's optimizers and schedulers; state is loaded after it."""

    @abstractmethod
    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` ready for training; `step.module` is the user's, in its place.

        Args:
            step: its forward is the user's `training_step`.
            one_backward: one optimizer, stepped by the engine: gradients may be exchanged while the
                backward pass runs. Otherwise `reduce_gradients` is called after each backward pass.
        """

    def run_step(self, scope: StepScope, module: TrainingModule, name: StepName, batch: Any, *arguments: Any) -> Any:
        """Return what the user's step called `name` returns; in training it is called within what `wrap` returned.

        Args:
            scope: calls the step.
            module: whose step it is.
            name: of the method.
            batch: of this rank.
            arguments: that the method is given after it.
        """
        return scope.call(module, name, batch, *arguments)

    @abstractmethod
    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of `parameters` over the ranks, where `wrap` did not arrange for it."""

    @abstractmethod
    def is_replicated(self, path: str) -> bool:
        """Return whether the tensor at `path` of the state tree has the same bits on every rank: one writes it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the bits of the sums this strategy makes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take back what `state_dict` gave; called after `wrap` and before any other part is loaded."""

    def clone(self) -> Self:
        """Return a strategy that can be given a state while this one trains, without an exchange."""
        return copy.copy(self)
