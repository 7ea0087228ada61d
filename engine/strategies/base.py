"""What a strategy is: how one module trains on many devices."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from midstride.engine.hooks import calling
from midstride.engine.module import TrainingModule
from midstride.engine.world import World

__all__ = ["Strategy", "TrainingStep"]


class TrainingStep(nn.Module):
    """What a strategy wraps: a module whose forward is the user's training step."""

    def __init__(self, module: TrainingModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        """Return what the user's `training_step` returns."""
        # Only what is raised in here is the user's: around it, other ranks' deaths show as exceptions too.
        return calling(f"{type(self.module).__name__}.training_step", self.module.training_step, *args)


class Strategy(ABC):
    """How one module trains on many devices.

    A strategy never starts processes (that is a launcher), never writes files (that is a
    snapshot) and never reads the environment (that is `World`). `init_process_group` and
    `wrap` are the two places meant to be overridden.
    """

    name: ClassVar[str]

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device

    @abstractmethod
    def init_process_group(self) -> None:
        """Meet the other ranks; called once, before anything else. Calling it again does nothing."""

    @abstractmethod
    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` ready for training, its module already on this rank's device.

        Args:
            step: calls the user's `training_step`.
            one_backward: one optimizer, stepped by the engine: gradients may be exchanged while the
                backward pass runs. Otherwise `reduce_gradients` is called after each backward pass.
        """

    @abstractmethod
    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks, the same list on every rank."""

    def accumulate(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Hold gradient exchange back while the block runs."""
        return nullcontext()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of `parameters` over the ranks, where `wrap` did not arrange for it."""

    def is_replicated(self, path: str) -> bool:
        """Return whether the tensor at `path` of the state tree has the same bits on every rank."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the bits of the sums this strategy makes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take back what `state_dict` gave; called after `wrap` and before any other part is loaded."""
