"""Sharded training: each rank has its rows of weights, gradients and optimizer state."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import UnsupportedState, UserError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.quantized import load_weights
from midstride.engine.modules.state_entries import described
from midstride.engine.modules.torch_internals import parameters_of
from midstride.engine.optim.optimizers import lazy_tensors
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.row_shards import RowShard, distributed_tensor, no_rows, row_shard_of, shard_rows
from midstride.engine.state.stateful import AlikeOnRanks, Stateful
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import FixedParameters, ModelParallel, ShardsWeights, WeightsChange
from midstride.engine.strategies.own_loop import FIXED_WORLD
from midstride.engine.strategies.step import StepName, StepScope, TrainingStep
from midstride.engine.strategies.torch_collective import TorchCollective, broadcast_tensors
from midstride.engine.strategies.torch_internals import NORMALISATION, has_unreduced_gradients
from midstride.engine.trees import is_state_leaf, map_leaves

__all__ = ["FullySharded", "OwnShardedLoop", "Sharded"]

log = logging.getLogger(__name__)

#: Inputs are not cast here: autocast does so in a forward pass, as under every strategy.
_IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
#: methods of the module in which its weights are gathered
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Sharded(ModelParallel, ShardsWeights, FixedParameters, Strategy):
    """Shards weights, gradients and optimizer state by `torch.distributed.fsdp.fully_shard`.

    A step gathers the weights; its backward pass averages the gradients and shards them, after each batch of an
    accumulation window too, so that no rank ever keeps whole gradients. Each rank has its own buffers, such as the
    statistics of batch norm. The module stays sharded after a fit, and can be tested and trained again.

    Args:
        blocks: gather each element of the module's lists and sequences by itself, when it is called. False where
            some of them are used without being called.
        replicas: groups of ranks, each of which has all weights, cut over the ranks of the group; neighbours are in
            one group. Gradients are averaged within groups, then between them (torch's hybrid sharding).
        param_dtype: "bf16" to gather weights in 16 bits, for precision bf16; the pieces that the optimizer steps, and
            the mean of gradients, have their 32 bits. Normalisation layers are gathered by themselves, in 32 bits.
        cpu_offload: keep the pieces of weights, gradients and optimizer state on the host, and step there.
    """

    name = "sharded"
    forward_is_collective = True
    #: whether the gathered weights of a block are freed after its forward pass, and gathered again for its backward
    frees_after_forward: ClassVar[bool] = False

    def __init__(
        self,
        *,
        blocks: bool = True,
        replicas: int = 1,
        param_dtype: Literal["bf16"] | None = None,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__(TorchCollective())
        self._blocks = blocks
        self._replicas = replicas
        self._param_dtype = param_dtype
        self._cpu_offload = cpu_offload
        self._module: TrainingModule | None = None

    @property
    def identity(self) -> str:
        """The name, and the options that change the bits of a run."""
        options = {
            "blocks": (self._blocks, True),
            "replicas": (self._replicas, 1),
            "param_dtype": (self._param_dtype, None),
            "cpu_offload": (self._cpu_offload, False),
        }
        chosen = [f"{name}={value}" for name, (value, default) in options.items() if value != default]
        return f"{super().identity}({', '.join(chosen)})" if chosen else super().identity

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on parts that `fully_shard` cannot shard or would not train."""
        faults = super().module_errors(module)
        if lazy := lazy_tensors(module):
            return [*faults, lazy]
        faults += [_parameter_error(name, parameter) for name, parameter in module.named_parameters()]
        faults += [
            f"the module's {name} has sparse gradients, which strategy {self.name} cannot cut: build it with "
            "sparse=False, or use strategy single"
            for name in sparse_layers(module)
        ]
        if not module.automatic_optimization:
            faults.append(
                f"{type(module).__name__} has automatic_optimization = False: use automatic optimization, or ddp. "
                f"Under {self.name} gathered weights would be older than a manual step."
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
        """Broadcast rank 0's weights and shard them, unless an earlier fit has."""
        self._module = module
        if isinstance(module, FSDPModule):
            return
        self.shard(module)
        for step in (step for step in _STEPS if getattr(module, step) is not None):
            register_fsdp_forward_method(module, step)

    def shard(self, module: nn.Module) -> None:
        """Broadcast rank 0's weights of `module` and shard them."""
        gathered = blocks(module) if self._blocks else []
        if self.frees_after_forward and not gathered and self.world.is_first:
            log.warning(
                "fully_sharded has nothing to free between forward and backward: %s has no list or sequence of blocks, "
                "and is gathered as one",
                type(module).__name__,
            )
        mesh = self._mesh()
        norms = norms_of(module) if self._param_dtype else {}
        for norm in norms:
            self._cut(norm, mesh, MixedPrecisionPolicy())
        for submodule in (*(block for block in gathered if block not in norms), module):
            self._cut(submodule, mesh, _IN_16_BITS if self._param_dtype else MixedPrecisionPolicy())

    def _mesh(self) -> DeviceMesh:
        shards = self.world.size // self._replicas
        if self._replicas == 1:
            return init_device_mesh(self.device.type, (shards,))
        return init_device_mesh(self.device.type, (self._replicas, shards), mesh_dim_names=("replicate", "shard"))

    def _cut(self, submodule: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        """Move `submodule` to the device and shard it. One call at a time saves memory there."""
        whole = uncut_tensors(submodule)
        for tensor in whole:
            tensor.data = tensor.data.to(self.device)
        broadcast_tensors(whole)
        fully_shard(
            submodule,
            mesh=mesh,
            # None: torch frees all but the root, whose backward pass follows at once.
            reshard_after_forward=None if self.frees_after_forward else False,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if self._cpu_offload else OffloadPolicy(),
        )
        _keep_name(submodule)

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return a message if there are several optimizers."""
        if len(optimizers) < 2:
            return []
        return [
            f"strategy {self.name} with {len(optimizers)} optimizers: use one optimizer with several parameter groups, "
            "or ddp. Weights are gathered for a whole batch, in which the trained ones would change."
        ]

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Check that the optimizer holds the sharded parameters.

        Raises:
            UserError: it was made before the weights were sharded.
        """
        for group in optimizers[0].param_groups:
            if not all(isinstance(parameter, DTensor) for parameter in group["params"]):
                raise UserError(
                    f"the {type(optimizers[0]).__name__} holds weights as they were before strategy {self.name} cut "
                    "them, and would train nothing. Create it in configure_optimizers, with self.parameters()."
                )

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` itself: the steps of the module gather its weights."""
        self.fix_parameters(step.module)
        return step

    def step_call(self, scope: StepScope, module: TrainingModule, name: StepName) -> Callable[..., Any]:
        """Return a function that calls the user's step; every rank calls it."""
        call = super().step_call(scope, module, name)
        if name == "training_step":  # the backward pass reshards the weights
            return call

        def resharded(*arguments: Any) -> Any:
            outputs = call(*arguments)
            _reshard(module)
            return outputs

        return resharded

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: each backward pass has averaged and sharded the gradients."""

    def wrap_state(self, part: Stateful) -> Stateful:
        """Return `part` with its tensors as row shards."""
        assert self._module is not None
        return ShardedState(part, self._module)

    @property
    def row_shard(self) -> tuple[int, int]:
        """The index of this rank's rows of a sharded tensor, and the number of its shards."""
        shards = self.world.size // self._replicas
        return self.world.rank % shards, shards

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights on rank 0, gathered one by one; an empty dict on other ranks."""
        gathered: dict[int, Any] = {}  # by id, so that tied weights stay tied
        named: dict[str, Any] = {}
        _reshard(module)
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in gathered:
                whole = cast("DTensor", value.detach()).full_tensor() if isinstance(value, DTensor) else value
                if not self.world.is_first:  # other ranks only take part in the gather
                    whole = None
                gathered[id(value)] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
            named[name] = gathered[id(value)]
        return named if self.world.is_first else {}

    def own_weights(self, module: nn.Module, change: WeightsChange) -> dict[str, Any]:
        """Return this rank's rows of the weights; rank 0 adds those that are not sharded."""
        _reshard(module)
        replica = self.world.rank // self.row_shard[1]
        weights = described(module, change(module.state_dict()))
        parts = {name: _in_order(_row_shard(value)) for name, value in weights.items()}
        if replica:  # the first one writes them
            parts = {name: no_rows(part) for name, part in parts.items() if isinstance(part, RowShard)}
        return {name: part for name, part in parts.items() if self.world.is_first or isinstance(part, RowShard)}

    def wanted_rows(self, module: nn.Module) -> tuple[int, int]:
        """Return those of this rank; all rows before the module is sharded."""
        return self.row_shard if isinstance(module, FSDPModule) else (0, 1)

    def load_full_state_dict(self, module: TrainingModule, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's rows of whole weights; row shards and distributed tensors as they are."""
        own = module.state_dict()

        def of_this_rank(name: str, value: Any) -> Any:
            theirs = own.get(name)
            if not isinstance(theirs, DTensor) or isinstance(value, DTensor):
                return value
            shard = value if isinstance(value, RowShard) else shard_rows(value, *self.row_shard)
            return distributed_tensor(shard, theirs)

        load_weights(module, {name: of_this_rank(name, value) for name, value in state_dict.items()})

    def is_replicated(self, path: str) -> bool:
        """Return False: each rank has its own rows."""
        return False


class FullySharded(Sharded):
    """The same, but the gathered weights of a block are freed after its forward pass."""

    name = "fully_sharded"
    frees_after_forward = True


class ShardedState(AlikeOnRanks):
    """A part of the state with sharded tensors. A snapshot has one `RowShard` of each per rank."""

    description = "the state that is not sharded, such as statistics of batch norm,"

    def __init__(self, part: Stateful, module: nn.Module) -> None:
        self._part, self._module = part, module

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the part, with row shards in place of distributed tensors."""
        _reshard(self._module)
        ModuleIndex.of(self._module).forget()  # that may have replaced the parameters
        return cast("dict[str, Any]", map_leaves(_row_shard, self._part.state_dict(), is_leaf=is_state_leaf))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the part, with distributed tensors in place of row shards."""
        like = next(p for p in self._module.parameters() if isinstance(p, DTensor))

        def distributed(value: Any) -> Any:
            return distributed_tensor(value, like) if isinstance(value, RowShard) else value

        self._part.load_state_dict(map_leaves(distributed, state_dict, is_leaf=is_state_leaf))

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the state of rank 0, with this rank's row shards; warn if the rest differs."""
        super().resharded([map_leaves(_uncut, state, is_leaf=is_state_leaf) for state in states], rank)
        return states[0]


def _parameter_error(name: str, parameter: nn.Parameter) -> str:
    """Return a message on a parameter that cannot be sharded; an empty one if it can."""
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


def _keep_name(submodule: nn.Module) -> None:
    """Rename the class derived by `fully_shard` to its original.

    Messages, identity and state use the name.
    """
    made, given = type(submodule), type(submodule).__mro__[2]
    made.__name__, made.__qualname__, made.__module__ = given.__name__, given.__qualname__, given.__module__


def _reshard(module: nn.Module) -> None:
    """Free the gathered weights of the module and its submodules."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def _uncut(value: Any) -> Any:
    """Return `value`, and nothing in place of a row shard."""
    return None if isinstance(value, RowShard) else value


def _in_order(value: Any) -> Any:
    """Return a row shard in the order of its elements, as tools read it; other values unchanged."""
    return value._replace(rows=value.rows.contiguous()) if isinstance(value, RowShard) else value


def _row_shard(value: Any) -> Any:
    """Return the row shard of a distributed tensor on this rank; other values unchanged.

    Raises:
        UnsupportedState: the tensor is not sharded by rows.
    """
    if not isinstance(value, DTensor):
        return value
    if (shard := row_shard_of(value)) is None:
        raise UnsupportedState(
            f"a distributed tensor of {tuple(value.shape)} is placed as {value.placements}, and snapshots hold tensors "
            "that are cut by rows. Weights of tensor parallelism (parallelize_module): use fully_shard alone, or ddp. "
            "State of an optimizer: take one that keeps a number for each weight, or ddp."
        )
    return shard


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the units gathered on their own: elements of the outermost lists of `module`.

    Elements without weights, without a `forward`, or with weights that are shared with others are left out.
    """
    counts = _parameter_counts(module)

    def found(parent: nn.Module, listed: bool) -> Iterator[nn.Module]:
        for child in parent.children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                yield from found(child, True)
            elif listed and _is_block(child, counts):
                yield child
            else:
                yield from found(child, False)

    return list(found(module, False))


def _is_block(submodule: nn.Module, counts: Counter[int]) -> bool:
    own = _parameter_counts(submodule)
    can_be_called = type(submodule).forward is not nn.Module.forward
    return bool(own) and can_be_called and all(counts[weight] == count for weight, count in own.items())


def _parameter_counts(module: nn.Module) -> Counter[int]:
    """Return how often each parameter occurs in `module`, by id."""
    every = module.named_modules(remove_duplicate=False)
    return Counter(id(p) for _, submodule in every for p in parameters_of(submodule).values() if p is not None)


def norms_of(module: nn.Module) -> dict[nn.Module, None]:
    """Return the normalisation layers with weights, in order, as keys of a dict."""
    counts = _parameter_counts(module)
    return {norm: None for norm in module.modules() if isinstance(norm, NORMALISATION) and _is_block(norm, counts)}


def uncut_tensors(module: nn.Module) -> list[Tensor]:
    """Return the weights and buffers of `module` outside of submodules that are sharded already."""
    cut = [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
    done = {id(tensor) for submodule in cut for tensor in (*submodule.parameters(), *submodule.buffers())}
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in done]


class OwnShardedLoop(FullySharded):
    """Trains modules that the user's loop calls, whose weights are sharded.

    Args:
        collective: the ranks.
        modules: all modules as one; None to shard one by `shard` only.
    """

    name = "own loop, sharded"
    fixed_world = FIXED_WORLD

    def __init__(self, collective: Collective, modules: nn.Module | None = None) -> None:
        super().__init__()
        self.collective, self._modules = collective, modules

    def can_save(self) -> bool:
        """Return False within a window of `set_requires_gradient_sync(False)`.

        Its gradients are not sharded.
        """
        assert self._modules is not None
        return not any(has_unreduced_gradients(one) for one in self._modules.modules() if isinstance(one, FSDPModule))

    def wrap_state(self, part: Stateful) -> Stateful:
        """Return `part` with its tensors as row shards."""
        assert self._modules is not None
        return ShardedState(part, self._modules)
