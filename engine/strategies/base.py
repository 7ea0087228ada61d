"""What a strategy is: how one module trains on many devices."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.modules.module import TrainingModule
from midstride.engine.seeds import DeviceGenerator
from midstride.engine.state.stateful import Stateful
from midstride.engine.strategies.side_channel import Channel
from midstride.engine.user_code import call_user_code
from midstride.engine.world import World

__all__ = ["LossOf", "Strategy", "TrainingStep"]

#: the loss of a part of a batch, of the outputs for that part and of the part itself
LossOf = Callable[[Any, Any], Tensor]


class TrainingStep(nn.Module):
    """What a strategy wraps: a module whose forward is the user's training step."""

    def __init__(self, module: TrainingModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        """Return what the user's `training_step` returns."""
        module = self.module  # looked up once: nn.Module takes its time
        heartbeat = module.trainer.heartbeat
        heartbeat.begin()
        # Only what is raised in here is the user's: around it, other ranks' deaths show as exceptions too.
        outputs = call_user_code(f"{type(module).__name__}.training_step", module.training_step, *args)
        heartbeat.worked()
        return outputs


class Strategy(ABC):
    """How one module trains on many devices.

    A strategy never starts processes (that is a launcher), never writes files (that is a
    snapshot) and never reads the environment (that is `World`). `init_process_group` and
    `wrap` are the two places meant to be overridden. Its constructor takes `strategy_args`.
    """

    #: its row in `midstride.engine.strategies.STRATEGIES`; what is made from a class keeps that class's row
    name: ClassVar[str]
    #: whether calling the module is an exchange, which every rank has to join: a rank without a batch repeats one
    forward_is_collective: ClassVar[bool] = False
    #: whether `train` runs forward and backward passes itself, in an order of its own
    schedules: ClassVar[bool] = False
    #: why a run cannot go on with another number of ranks, as text; None if it can
    fixed_world: ClassVar[str | None] = None
    #: whether an optimizer may evaluate the training step several times in one of its own, as LBFGS does
    takes_closures: ClassVar[bool] = True
    #: whether something is measured before the first step, and kept for later lives; see `facts`
    measures: bool = False
    #: of the device, where torch's own functions do not reach it
    generator: DeviceGenerator | None = None

    def __init__(self) -> None:
        self.world = World()
        self.devices: Sequence[torch.device] = [torch.device("cpu")]

    def attach(self, world: World, devices: Sequence[torch.device]) -> None:
        """Belong to `world`; this rank has `devices`, more than one where a process splits its batches."""
        self.world, self.devices = world, devices

    @contextmanager
    def waiting_at_most(self, timeout_s: float) -> Iterator[None]:
        """Let ranks wait no longer for one that does not answer, until the block ends; where the strategy can."""
        yield

    def lost_another(self, error: Exception) -> bool:
        """Return whether `error` says that another rank did not answer, or left."""
        return False

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
    def readers(self) -> World:
        """The world that samples are dealt to: ranks that read the same ones stand at one place in it."""
        return self.world

    def refusals(self, module: TrainingModule) -> list[str]:
        """Return messages on what `module` wants and this strategy cannot do."""
        return []

    def mismatches(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return messages on what of a fit that is put together this strategy cannot do.

        Args:
            optimizers: that the engine steps.
            options: of the Trainer.
            batch_size: of training, on this rank; None where batches have no fixed size.
        """
        return []

    def facts(self) -> dict[str, Any]:
        """Return, as JSON, what a later life has to know before it places the module."""
        return {}

    def recall(self, facts: dict[str, Any]) -> None:
        """Go by the `facts` of an earlier life of the run rather than measure again."""

    @abstractmethod
    def init_process_group(self) -> None:
        """Meet the other ranks; called once, before anything else. Calling it again does nothing."""

    def place(self, module: TrainingModule, first_batch: Callable[[], Any] | None = None) -> None:
        """Bring `module` to where it trains, or as much of it as this rank has; optimizers are made after it.

        Args:
            module: whole, on the host; or as an earlier call left it.
            first_batch: reads the first training batch, for a strategy that measures; None where nothing is trained.
        """
        module.to(self.device)

    @abstractmethod
    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` ready for training, its module in its place.

        Args:
            step: calls the user's `training_step`.
            one_backward: one optimizer, stepped by the engine: gradients may be exchanged while the
                backward pass runs. Otherwise `reduce_gradients` is called after each backward pass.
        """

    def configured(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Change what `configure_optimizers` returned, torch's optimizers and schedulers; state is loaded after it."""

    @abstractmethod
    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks, the same list on every rank."""

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on every rank; every rank calls this at the same place."""
        return all(self.gather(value))

    def store(self) -> Any:
        """Return a new corner of the key-value store in which the ranks met; None if there are no others."""
        return None

    def channel(self) -> Channel:
        """Return a way to exchange values beside training; every rank calls this at the same place."""
        return Channel(self.world.size)

    def mark_step(self) -> None:
        """Have everything carried out that was asked of the device, where it collects operations.

        Called at every boundary, whether a snapshot is taken there or not, and after each batch of an evaluation.
        """

    def evaluate(self, module: TrainingModule, step: str, *arguments: Any) -> Any:
        """Return what the user's `validation_step`, `test_step` or `predict_step` returns."""
        return call_user_code(f"{type(module).__name__}.{step}", getattr(module, step), *arguments)

    def joined(self, outputs: Any) -> Any:
        """Return a training step's outputs, after `training_step_end`, with one loss for all parts of the batch."""
        return outputs

    def train(self, wrapped: nn.Module, batch: Any, index: int, loss_of: LossOf) -> None:
        """Run forward and backward for `batch`, where the strategy `schedules` them.

        Args:
            wrapped: what `wrap` returned.
            batch: of this rank.
            index: its place in the epoch.
            loss_of: to be called for each part of the batch, wherever the outputs are.
        """
        raise NotImplementedError(f"{type(self).__name__} schedules forward and backward, but has no train: write one")

    def accumulate(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Hold gradient exchange back while the block runs."""
        return nullcontext()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of `parameters` over the ranks, where `wrap` did not arrange for it."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """Scale the gradients of `parameters` down to a norm of `max_norm` in all, if they have a larger one."""
        clip_grad_norm_(parameters, max_norm)

    def exchange_collected(self) -> None:
        """Exchange the gradients of a window whose last batch has none, where that is part of a backward pass."""

    def kept(self, part: Stateful) -> Stateful:
        """Return the module, the optimizers or the gradients as they are kept in a snapshot."""
        return part

    def weights(self, module: TrainingModule) -> dict[str, Any]:
        """Return the state_dict of the whole module, for rank 0 to write; every rank calls this at the same place."""
        return module.state_dict()

    def load_weights(self, module: TrainingModule, weights: Mapping[str, Any]) -> None:
        """Load what `weights` returned, before `place` or after it; every rank calls this."""
        module.load_state_dict(weights)

    def is_replicated(self, path: str) -> bool:
        """Return whether the tensor at `path` of the state tree has the same bits on every rank."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the bits of the sums this strategy makes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take back what `state_dict` gave; called after `wrap` and before any other part is loaded."""

    def clone(self) -> Self:
        """Return a strategy that can be given a state while this one trains, without an exchange."""
        return copy.copy(self)
