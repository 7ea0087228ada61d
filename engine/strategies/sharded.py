"""Sharded training: each rank has its rows of every weight, of its gradient and of what the optimizer keeps of it."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from midstride.engine.errors import UnsupportedState, UserError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.torch_internals import parameters_of
from midstride.engine.state.row_shards import RowShard, reshard_rows, shard_rows
from midstride.engine.state.stateful import Stateful
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.mixins import ModelParallel
from midstride.engine.strategies.step import StepName, StepScope, TrainingStep
from midstride.engine.strategies.torch_collective import TorchCollective, broadcast
from midstride.engine.trees import map_leaves

__all__ = ["FullySharded", "Sharded", "blocks"]

log = logging.getLogger(__name__)

#: in which the weights are whole
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Sharded(ModelParallel, Strategy):
    """Cut weights, gradients and optimizer state over the ranks (`torch.distributed.fsdp.fully_shard`).

    In a step the weights are gathered, before its optimizer steps the gradients are averaged and cut: after each
    batch of an accumulation window too, so that no rank ever keeps whole ones. Buffers (the statistics of batch
    norm) are each rank's own. The module stays in pieces after a fit; it is tested and trained again as it is.

    Args:
        blocks: gather each element of the module's lists and sequences by itself, when it is called. False where
            some of them are used without being called.
    """

    name = "sharded"
    forward_is_collective = True
    #: whether what was gathered for a block is freed after its forward pass, to be gathered again for its backward
    frees_after_forward: ClassVar[bool] = False

    def __init__(self, *, blocks: bool = True) -> None:
        super().__init__(TorchCollective())
        self._blocks = blocks
        self._module: TrainingModule | None = None

    @property
    def identity(self) -> str:
        """The name, and whether the module is gathered as one."""
        return super().identity if self._blocks else f"{super().identity}(blocks=False)"

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return what `fully_shard` cannot cut, or would not train."""
        faults = [_refusal(name, parameter) for name, parameter in module.named_parameters()]
        faults += [
            f"the module's {name} has sparse gradients, which strategy {self.name} cannot cut: build it with "
            "sparse=False, or use strategy single"
            for name, part in module.named_modules()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        ]
        if not module.automatic_optimization:
            faults.append(
                f"{type(module).__name__} has automatic_optimization = False: under {self.name} a step by hand would "
                "go on with the weights that were gathered before it. Use ddp, or automatic optimization."
            )
        kinds = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.requires_grad}
        if len(kinds) > 1:
            faults.append(
                f"the module's weights are of several types ({', '.join(sorted(kinds))}), and strategy {self.name} "
                "exchanges them together: give all that train the same one, or use ddp"
            )
        return [fault.replace("{strategy}", self.name) for fault in faults if fault]

    def setup_module(
        self, module: TrainingModule, scope: StepScope, first_batch: Callable[[], Any] | None = None
    ) -> None:
        """Start from rank 0's weights and cut them, unless an earlier fit has done so."""
        self._module = module
        if isinstance(module, FSDPModule):
            return
        module.to(self.device)
        broadcast(module)
        mesh = init_device_mesh(self.device.type, (self.world.size,))
        parts = blocks(module) if self._blocks else []
        if self.frees_after_forward and not parts and self.world.is_first:
            log.warning(
                "fully_sharded has nothing to free between forward and backward: %s has no list or sequence of blocks, "
                "and is gathered as one",
                type(module).__name__,
            )
        for part in (*parts, module):
            # By default torch frees all but the root, which is needed again at once.
            fully_shard(part, mesh=mesh, reshard_after_forward=None if self.frees_after_forward else False)
            _keep_name(part)
        for step in _STEPS:
            register_fsdp_forward_method(module, step)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Refuse optimizers that would not train the pieces.

        Raises:
            UserError: there are several, or one was made before the weights were cut.
        """
        if len(optimizers) > 1:
            raise UserError(
                f"strategy {self.name} with {len(optimizers)} optimizers: which weights train changes within a batch, "
                "and they are gathered for all of it. Use one optimizer (with several parameter groups), or ddp."
            )
        for group in optimizers[0].param_groups:
            if not all(isinstance(parameter, DTensor) for parameter in group["params"]):
                raise UserError(
                    f"the {type(optimizers[0]).__name__} holds weights as they were before strategy {self.name} cut "
                    "them, and would train nothing: make it in configure_optimizers, of self.parameters()."
                )

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` as it is: the module's own steps gather its weights."""
        return step

    def run_step(self, scope: StepScope, module: TrainingModule, name: StepName, batch: Any, *arguments: Any) -> Any:
        """Return what the user's step returns; every rank calls this."""
        outputs = super().run_step(scope, module, name, batch, *arguments)
        if name != "training_step":
            cast("FSDPModule", module).reset_iter_state()  # no backward pass frees what it gathered
        return outputs

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: each backward pass has averaged and cut them."""

    def wrap_state(self, part: Stateful) -> Stateful:
        """Return `part` with its tensors as row shards."""
        assert self._module is not None
        return _ShardedState(part, self._module, self.world.size)

    def full_state_dict(self, module: TrainingModule) -> dict[str, Any]:
        """Return the whole weights on the first rank, gathered one after another, and nothing elsewhere."""
        gathered: dict[int, Any] = {}  # what is tied stays so
        named: dict[str, Any] = {}
        _free(module)
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in gathered:
                whole = cast("DTensor", value.detach()).full_tensor() if isinstance(value, DTensor) else value
                gathered[id(value)] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
            if not self.world.is_first:
                gathered[id(value)] = None
            named[name] = gathered[id(value)]
        return named if self.world.is_first else {}

    def load_full_state_dict(self, module: TrainingModule, state_dict: Mapping[str, Any]) -> None:
        """Load whole weights: each rank its rows of them."""
        held = module.state_dict()

        def of_this_rank(name: str, value: Any) -> Any:
            theirs = held.get(name)
            if not isinstance(theirs, DTensor):
                return value
            return _distributed(shard_rows(value, self.world.rank, self.world.size), theirs.device_mesh, theirs.device)

        module.load_state_dict({name: of_this_rank(name, value) for name, value in state_dict.items()})

    def is_replicated(self, path: str) -> bool:
        """Nothing of size is alike on two ranks."""
        return False


class FullySharded(Sharded):
    """The same, and what was gathered for a block is freed after its forward pass."""

    name = "fully_sharded"
    frees_after_forward = True


class _ShardedState:
    """A part of a run's state whose tensors are cut over the ranks: a snapshot has a `RowShard` per rank."""

    def __init__(self, part: Stateful, module: TrainingModule, size: int) -> None:
        self._part, self._module, self._size = part, module, size

    def state_dict(self) -> dict[str, Any]:
        """Return the part's state, with row shards."""
        _free(self._module)
        return cast("dict[str, Any]", map_leaves(self._part.state_dict(), _row_shard))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Give the part its state back."""
        like = next(p for p in self._module.parameters() if isinstance(p, DTensor))

        def placed(value: Any) -> Any:
            return _distributed(value, like.device_mesh, like.device) if isinstance(value, RowShard) else value

        self._part.load_state_dict(map_leaves(state_dict, placed))

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the row shards of `rank` in a new world, given those of all ranks of the old one."""
        return cast("dict[str, Any]", reshard_rows(states, rank, self._size))


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return what is gathered by itself: the elements of the outermost lists and sequences of `module`.

    Not those without weights, those that cannot be called, and those that share weights with the rest.
    """
    places = _parameter_counts(module)

    def found(part: nn.Module, listed: bool) -> Iterator[nn.Module]:
        for child in part.children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                yield from found(child, True)
            elif listed and _is_block(child, places):
                yield child
            else:
                yield from found(child, False)

    return list(found(module, False))


def _is_block(part: nn.Module, places: Counter[int]) -> bool:
    own = _parameter_counts(part)
    can_be_called = type(part).forward is not nn.Module.forward
    return bool(own) and can_be_called and all(places[weight] == count for weight, count in own.items())


def _parameter_counts(module: nn.Module) -> Counter[int]:
    """In how many places of `module` each weight is."""
    every = module.named_modules(remove_duplicate=False)
    return Counter(id(p) for _, part in every for p in parameters_of(part).values() if p is not None)


def _refusal(name: str, parameter: nn.Parameter) -> str:
    if parameter.ndim == 0:
        return (
            f"the module's {name} is a single number without a dimension, which strategy {{strategy}} cannot cut: give "
            "it a shape of (1,)"
        )
    if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
        return (
            f"the module's {name} is not contiguous (channels_last, or a transposed view), which strategy {{strategy}} "
            "cannot cut: make it contiguous, or use ddp"
        )
    return ""


def _keep_name(part: nn.Module) -> None:
    """Let the class that torch makes of a module's go by its name: messages, identity and state depend on it."""
    made, given = type(part), type(part).__mro__[2]
    made.__name__, made.__qualname__, made.__module__ = given.__name__, given.__qualname__, given.__module__


def _free(module: nn.Module) -> None:
    """Let the module have its pieces only."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _row_shard(value: Any) -> Any:
    """Return the piece that a distributed tensor is here; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    if value.placements != (Shard(0),):
        raise UnsupportedState(
            f"a distributed tensor of {tuple(value.shape)} is placed as {value.placements}, not cut by rows: an "
            "optimizer keeps more than one number for each weight. Use strategy ddp, or another optimizer."
        )
    each = -(-len(value) // mesh.size())
    rows = cast("DTensor", value.detach()).to_local()
    return RowShard(rows, min(mesh.get_local_rank() * each, len(value)), tuple(value.shape))


def _distributed(shard: RowShard, mesh: DeviceMesh, device: torch.device) -> DTensor:
    shape = torch.Size(shard.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard.rows.to(device), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
