"""Optional abilities of strategies: a class each, which the engine checks by `isinstance`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from midstride.engine.errors import UserError
from midstride.engine.lanes import Lanes
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.quantized import load_weights, weights_of
from midstride.engine.modules.state_entries import described
from midstride.engine.seeds import DeviceGenerator
from midstride.engine.state.stateful import Stateful
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.gradient_buckets import GradientBuckets
from midstride.engine.strategies.step import TrainingStep

__all__ = [
    "AveragesInBuckets",
    "BackwardSync",
    "FixedParameters",
    "FixedWorld",
    "LazyDevice",
    "LossOf",
    "Measures",
    "MergesOutputs",
    "ModelParallel",
    "ReplicatesParameters",
    "RunsBackward",
    "RunsLanes",
    "ShardsWeights",
    "WatchesFrozen",
    "WeightsChange",
    "device_generator",
    "full_state_dict",
    "gradient_buckets",
    "lanes_of",
    "load_full_state_dict",
    "parameter_check",
    "saved_weights",
    "stop_watching",
]

#: function of the outputs for a part of a batch, and of that part, that returns its loss
LossOf = Callable[[Any, Any], Tensor]
#: function of a state_dict that returns the one to be written in its place
WeightsChange = Callable[[dict[str, Any]], dict[str, Any]]


class ReplicatesParameters(Strategy):
    """Every rank has the same values of all parameters; buffers can differ."""

    _parameters: frozenset[str] = frozenset()

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` itself, and record the names of its parameters."""
        self._parameters = frozenset(name for name, _ in step.module.named_parameters(remove_duplicate=False))
        return step

    def is_replicated(self, path: str) -> bool:
        """Return whether `path` is that of a parameter, or of its optimizer state."""
        kind, _, name = path.partition("/")
        return kind == "optimizers" or (kind == "module" and name in self._parameters)


class BackwardSync(ABC):
    """Gradients are exchanged while the backward pass runs."""

    @abstractmethod
    def no_backward_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context without gradient exchange in backward passes of `wrapped`, from `wrap`."""

    @abstractmethod
    def sync_pending_gradients(self) -> None:
        """Exchange the gradients of an accumulation window whose last batch has none."""


class AveragesInBuckets(ABC):
    """Averages gradients in buckets, some of them during the backward pass."""

    @property
    @abstractmethod
    def buckets(self) -> GradientBuckets | None:
        """The buckets; None if gradients are averaged in another way."""


class RunsBackward(ABC):
    """Runs forward and backward passes itself, in its own order."""

    @abstractmethod
    def train(self, wrapped: nn.Module, batch: Any, index: int, loss_of: LossOf) -> None:
        """Run forward and backward for `batch`.

        Args:
            wrapped: the result of `wrap`.
            batch: the batch of this rank.
            index: number of the batch in the epoch.
            loss_of: returns the loss of a micro-batch; called on the rank that has its outputs.
        """


class RunsLanes(ABC):
    """Runs each batch in lanes, so that results do not depend on the number of ranks."""

    @property
    @abstractmethod
    def lanes(self) -> Lanes:
        """The lanes of the run, and those of this rank."""

    @abstractmethod
    def batch(self) -> AbstractContextManager[None]:
        """Return the context of a batch's lanes, which averages gradients and buffers at its end."""

    @abstractmethod
    def lane(self, lane: int) -> AbstractContextManager[None]:
        """Return the context of a lane's forward and backward pass, in order, in that of its batch."""

    @abstractmethod
    def restore_buffers(self) -> None:
        """Restore the module's buffers of before the current batch, from which each lane starts."""


class MergesOutputs(ABC):
    """Runs the chunks of a batch one after the other, and joins their outputs."""

    @abstractmethod
    def merge_outputs(self, outputs: Any) -> Any:
        """Return a training step's outputs after `training_step_end`, with one loss per batch."""


class Measures(ABC):
    """Measures something before the first step, for this and all later attempts of the run."""

    @abstractmethod
    def measurements(self) -> dict[str, Any]:
        """Return the measurements as a JSON document, which every snapshot holds."""

    @abstractmethod
    def load_measurements(self, measurements: dict[str, Any]) -> None:
        """Load the measurements of an earlier attempt of the run; called before `setup_module`."""


class LazyDevice(ABC):
    """A device that records operations, and executes them as one graph.

    Optimizers that evaluate a batch several times, such as LBFGS, are not supported.
    """

    #: the random number generator of the device, which torch's functions do not reach
    generator: DeviceGenerator

    @abstractmethod
    def mark_step(self) -> None:
        """Execute the recorded operations, at each boundary and after each evaluation batch."""


class FixedWorld:
    """A run may not be able to go on with another number of ranks."""

    #: why it cannot, as text; None if it can
    fixed_world: ClassVar[str | None] = None


class ModelParallel(FixedWorld, ABC):
    """Each rank has a part of the module only: rows of its tensors, or some of its layers.

    Optimizers that evaluate a batch several times, such as LBFGS, are not supported.
    """

    #: whether calling the module is a collective: a rank without a batch then repeats one
    forward_is_collective: ClassVar[bool] = False

    @property
    def row_shard(self) -> tuple[int, int]:
        """The index of this rank's rows of a sharded tensor, and the number of its shards."""
        return 0, 1

    @abstractmethod
    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole module's state_dict for rank 0 to write. Call it on all ranks at once."""

    def load_full_state_dict(self, module: TrainingModule, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `full_state_dict`, before or after `setup_module`, on all ranks."""
        load_weights(module, state_dict)

    def can_save(self) -> bool:
        """Return whether a snapshot taken now would hold all gradients, on all ranks."""
        return True

    def wrap_state(self, part: Stateful) -> Stateful:
        """Return the module, the optimizers or the gradients in the form that snapshots hold."""
        return part

    def clip_gradients(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """Scale the gradients of `parameters` down to a norm of `max_norm` over all ranks."""
        clip_grad_norm_(parameters, max_norm)


class ShardsWeights(ABC):
    """Each rank writes its own part of the weights in `best` and `last`; none gathers them."""

    @abstractmethod
    def own_weights(self, module: nn.Module, change: WeightsChange) -> dict[str, Any]:
        """Return the part that this rank writes of the module's state_dict, after `change`."""

    @abstractmethod
    def wanted_rows(self, module: nn.Module) -> tuple[int, int]:
        """Return the index of the row shard that `load_full_state_dict` needs, and their number."""


class FixedParameters:
    """Averages gradients of the parameters that exist when a fit begins, and of no others."""

    _fixed_parameters: Mapping[int, Tensor] | None = None  #: by id
    _checked_count = 0  #: how many parameters the optimizer had when they were last checked

    def fix_parameters(self, module: nn.Module) -> None:
        """Record the parameters of `module`, for `check_parameters`."""
        self._fixed_parameters, self._checked_count = {id(p): p for p in module.parameters()}, 0

    def check_parameters(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Raise if `optimizer` has parameters added during the fit, which would diverge by rank.

        Raises:
            UserError: it names the first of them.
        """
        groups, fixed = optimizer.param_groups, self._fixed_parameters
        if fixed is None or self._checked_count == (count := sum([len(group["params"]) for group in groups])):
            return
        self._checked_count = count
        if new := [p for group in groups for p in group["params"] if id(p) not in fixed]:
            names = {id(p): name for name, p in module.named_parameters()}
            raise UserError(
                f"{names.get(id(new[0]), 'a parameter')} was created in training, after the strategy was set up: ranks "
                "would not exchange its gradient. Create it in __init__ or setup, in a parameter group with lr=0, and "
                "raise the rate later."
            )


class WatchesFrozen(FixedParameters):
    """Averages gradients of the parameters that train when a fit begins, and of no others."""

    _watched: tuple[RemovableHandle, ...] = ()

    def watch_frozen(self, module: nn.Module) -> None:
        """Refuse gradients of now frozen parameters until the fit ends: they would diverge by rank."""
        frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad and p.is_floating_point()]
        self._watched = tuple(_refuse_gradients(name, parameter) for name, parameter in frozen)
        self.fix_parameters(module)

    def stop_watching(self) -> None:
        """Allow gradients of all parameters again, at the end of the fit."""
        for handle in self._watched:
            handle.remove()


def _refuse_gradients(name: str, parameter: nn.Parameter) -> RemovableHandle:
    def refuse(_: Tensor) -> None:
        raise UserError(
            f"{name} was frozen when strategy ddp was set up, and trains now: ranks would not exchange its gradient. "
            "Leave it unfrozen, in a parameter group with lr=0, and raise the rate later."
        )

    handle: RemovableHandle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(refuse)
    parameter.requires_grad_(False)
    return handle


def parameter_check(strategy: Strategy) -> Callable[[Optimizer, nn.Module], None] | None:
    """Return a function that raises on new parameters; None if `strategy` averages them too."""
    return strategy.check_parameters if isinstance(strategy, FixedParameters) else None


def stop_watching(strategy: Strategy) -> None:
    """Allow gradients of parameters that were frozen, at the end of a fit with `strategy`."""
    if isinstance(strategy, WatchesFrozen):
        strategy.stop_watching()


def device_generator(strategy: Strategy) -> DeviceGenerator | None:
    """Return the device's random number generator if torch's functions miss it; else None."""
    return strategy.generator if isinstance(strategy, LazyDevice) else None


def gradient_buckets(strategy: Strategy) -> GradientBuckets | None:
    """Return the buckets in which `strategy` averages gradients; None if it uses none."""
    return strategy.buckets if isinstance(strategy, AveragesInBuckets) else None


def lanes_of(strategy: Strategy) -> Lanes | None:
    """Return the lanes in which `strategy` runs batches; None if it does not."""
    return strategy.lanes if isinstance(strategy, RunsLanes) else None


def full_state_dict(strategy: Strategy, module: nn.Module) -> dict[str, Any]:
    """Return the whole module's state_dict for rank 0 to write. Call it on all ranks at once."""
    return strategy.full_state_dict(module) if isinstance(strategy, ModelParallel) else weights_of(module)


def saved_weights(
    strategy: Strategy, module: nn.Module, change: WeightsChange = lambda weights: weights
) -> dict[str, Any]:
    """Return the part of the changed weights that this rank writes; all ranks call it."""
    if isinstance(strategy, ShardsWeights):
        return strategy.own_weights(module, change)
    return described(module, change(full_state_dict(strategy, module)))


def load_full_state_dict(strategy: Strategy, module: TrainingModule, state_dict: Mapping[str, Any]) -> None:
    """Load the state_dict of a whole module, on every rank."""
    if isinstance(strategy, ModelParallel):
        strategy.load_full_state_dict(module, state_dict)
    else:
        load_weights(module, state_dict)
