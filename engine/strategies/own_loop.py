"""Ranks of a user's own loop, which calls modules and `DistributedDataParallel` itself."""

from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from midstride.engine.errors import NotExact
from midstride.engine.modules.torch_internals import gradient_hooks_of, uncompiled
from midstride.engine.objects.roots import is_user_hook
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.ddp import zero_loss
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import FixedWorld
from midstride.engine.strategies.step import TrainingStep

__all__ = ["FIXED_WORLD", "GradientOrder", "OwnLoop"]

#: modules of torch's hooks that average gradients over all ranks; others can leave the ranks with different weights
_AVERAGING = frozenset(
    f"torch.distributed.algorithms.ddp_comm_hooks.{name}"
    for name in ("default_hooks", "mixed_precision_hooks", "powerSGD_hook", "quantization_hooks")
)

FIXED_WORLD = "its loop is the script's own, which decides what each process reads and computes"


class OwnLoop(FixedWorld, Strategy):
    """Trains modules that the user's loop calls, in one process or as replicas.

    Args:
        collective: the ranks.
        replicated: modules in `DistributedDataParallel`, by the names of the modules in them.
        modules: names of all modules.
    """

    name = "own loop"
    fixed_world = FIXED_WORLD

    def __init__(
        self, collective: Collective, replicated: Mapping[str, DistributedDataParallel], modules: Iterable[str]
    ) -> None:
        super().__init__(collective)
        self._orders = {name: GradientOrder(wrapped) for name, wrapped in replicated.items()}
        equal = {name: self._orders[name] for name, one in replicated.items() if _keeps_equal(one)}
        self._parameters = {f"{name}.{path}" for name, order in equal.items() for path in order.parameters}
        self._are_all = set(equal) == set(modules)

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` itself."""
        return step

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: the user's modules do."""

    def is_replicated(self, path: str) -> bool:
        """Return whether `path` belongs to a replica's parameter, or to an optimizer of these alone."""
        if self.world.size == 1:
            return True
        kind, _, name = path.partition("/")
        return (kind == "optimizers" and self._are_all) or (kind == "module" and name in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the gradients of each replica."""
        return {name: order.state_dict() for name, order in self._orders.items()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Replay these orders.

        Raises:
            NotExact: a replica lacks a communication hook of the snapshot.
        """
        for name, order in self._orders.items():
            if missing := {*state_dict[name].get("hooks", ())} - {*order.hooks()}:
                raise NotExact(
                    f"the snapshot was taken while the replica of {name} had the communication hook {min(missing)}, "
                    "which this attempt has not registered. Call register_comm_hook before loop.epochs or loop.steps"
                )
            order.load_state_dict(state_dict[name])

    def clone(self) -> Self:
        """Return a copy that can load a state while this one trains: it replays nothing."""
        clone = super().clone()
        clone._orders = {name: order.clone() for name, order in self._orders.items()}
        return clone


def _keeps_equal(wrapped: DistributedDataParallel) -> bool:
    """Return whether all ranks get the same gradients: from DDP, or from hooks of torch."""
    if dist.get_world_size(wrapped.process_group) < dist.get_world_size():  # other ranks have replicas of their own
        return False
    return all(getattr(hook, "__module__", None) in _AVERAGING for hook, _ in gradient_hooks_of(wrapped))


class GradientOrder:
    """Order in which `DistributedDataParallel` sums gradients, recorded and replayed.

    From the second backward pass on it sums them in the order in which they became ready in the first one, which a
    resumed process would not repeat.

    Args:
        wrapped: before its first backward pass; None in a clone.
    """

    def __init__(self, wrapped: DistributedDataParallel | None) -> None:
        self._wrapped = wrapped
        self._order: list[str] | None = None
        self._ready: list[str] = []
        self._shares_buffers = True
        self._hooks: list[str] = []  #: of a clone
        #: parameters by name in the module that is wrapped
        self.parameters: dict[str, nn.Parameter] = {}
        if wrapped is not None:
            self.parameters = dict(uncompiled(wrapped.module).named_parameters())
            if not wrapped.find_unused_parameters:  # with it, the initial order is kept, the same in every attempt
                self._record(wrapped)

    def _record(self, wrapped: DistributedDataParallel) -> None:
        """Record the order of gradients in the first backward pass that exchanges them."""
        named = [(name, parameter) for name, parameter in self.parameters.items() if parameter.requires_grad]
        handles: list[Any] = []

        def recorder(name: str) -> Any:
            def record(_: Tensor) -> None:
                if not wrapped.require_backward_grad_sync or self._order is not None:
                    return
                is_first_pass = name not in self._ready
                if is_first_pass:
                    self._ready.append(name)
                # With a static graph some parameters may be unused: the first one of the second pass ends the first.
                if not is_first_pass or len(self._ready) == len(named):
                    self._order = self._ready
                    for handle in handles:
                        handle.remove()

            return record

        handles += [p.register_post_accumulate_grad_hook(recorder(n)) for n, p in named]

    def state_dict(self) -> dict[str, Any]:
        """Return the order, whether the next forward pass sends buffers, and torch's hooks."""
        shares = self._shares_buffers if self._wrapped is None else self._wrapped.require_forward_param_sync
        hooks = {"hooks": names} if (names := self.hooks()) else {}
        return {"gradient_order": self._order or self._ready or None, "shares_buffers": shares, **hooks}

    def hooks(self) -> list[str]:
        """Return the names of communication hooks of torch."""
        if self._wrapped is None:
            return self._hooks
        hooks = [hook for hook, _ in gradient_hooks_of(self._wrapped)]
        return [hook.__name__ for hook in hooks if isinstance(hook, FunctionType) and not is_user_hook(hook)]

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Replay the order by two backward passes of a stand-in module; every rank calls this."""
        self._order, self._shares_buffers = state_dict["gradient_order"], state_dict["shares_buffers"]
        wrapped = self._wrapped
        if wrapped is None:
            return
        if self._order:
            module = wrapped.module
            wrapped.register_module("module", _Replay(module, [self.parameters[name] for name in self._order]))
            try:
                for _ in range(2):  # with a static graph, DDP adopts the order in the second pass
                    with torch.enable_grad():
                        wrapped().backward()
            finally:
                wrapped.register_module("module", module)
        for parameter in self.parameters.values():
            parameter.grad = None
        setattr(wrapped, "require_forward_param_sync", self._shares_buffers)  # noqa: B010  # it is torch's

    def clone(self) -> "GradientOrder":
        """Return one that replays nothing."""
        clone = GradientOrder(None)
        clone._hooks = self.hooks()
        return clone


class _Replay(nn.Module):
    """Uses parameters so that their gradients become ready in the recorded order."""

    def __init__(self, module: nn.Module, order: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.module = module  # DDP broadcasts its buffers
        layers = dict(module.named_modules())
        self._sparse = {id(layers[path].weight) for path in sparse_layers(module)}
        self._order = list(order)

    def forward(self) -> Any:
        # Gradients become ready in the reverse order of use.
        return sum(zero_loss(one, is_sparse=id(one) in self._sparse) for one in reversed(self._order))
