"""The objects that a loop keeps: modules, optimizers, schedulers and others with a state."""

import gc
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from midstride.engine.errors import UserError
from midstride.engine.modules.torch_internals import children_of, uncompiled
from midstride.engine.optim.schedulers import SchedulerConfig
from midstride.engine.state.stateful import Stateful

__all__ = ["AcceleratorSteps", "Kept", "KeptModules", "is_of_fabric", "unwrapped"]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of wrappers: DDP, `torch.compile`, that of Lightning Fabric."""
    holds = isinstance(module, DistributedDataParallel) or is_of_fabric(module)
    inner: Any = module.module if holds else uncompiled(module)
    return module if inner is module else unwrapped(inner)


def is_of_fabric(value: object) -> bool:
    """Return whether `value` is a module or an optimizer that `Fabric.setup` has wrapped."""
    modules = [sys.modules.get(f"{package}.wrappers") for package in ("lightning.fabric", "lightning_fabric")]
    return any(module is not None and module.is_wrapped(value) for module in modules)


#: module of a wrapper -> the attribute that holds the object inside
_OF_ACCELERATE = {"accelerate.optimizer": "optimizer", "accelerate.scheduler": "scheduler"}
#: by the name of its class, since its import takes a second
_ZERO = "ZeroRedundancyOptimizer"


@cache
def _replicas() -> WeakSet[DistributedDataParallel]:
    """Return the replicas of this process, to which torch adds those that are made later."""
    found = WeakSet(one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))

    def add(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            found.add(module)

    register_module_module_registration_hook(add)
    return found


class KeptModules(nn.Module):
    """The kept modules as one, each under its name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        children_of(self).update(modules)


class AcceleratorSteps:
    """The count by which an `Accelerator` accumulates gradients, as a part of snapshots.

    Args:
        accelerator: the `Accelerator`; its other settings are built in each attempt.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the count."""
        setattr(self._accelerator, "step", state_dict["step"])  # noqa: B010  # an attribute of Accelerate's


@dataclass
class Kept:
    """The objects given to `Loop.keep`, by name and by kind."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    #: the modules that exchange gradients by themselves, by the names under which they were kept
    replicated: dict[str, DistributedDataParallel] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    schedulers: dict[str, SchedulerConfig] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    #: the objects as they were given, some of them wrappers
    given: list[Any] = field(default_factory=list)
    #: objects of midstride's own with a state
    parts: dict[str, Stateful] = field(default_factory=dict)
    #: the objects whose state some of these parts are, with the names of further attributes to keep
    owners: dict[str, tuple[Any, frozenset[str]]] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Keep `value` under `name`.

        Raises:
            UserError: the name is taken, or the same object was kept under another name.
        """
        if name in self.named:
            raise UserError(f"keep({name}=...): {name} is kept already. Use another name")
        for other, kept in self.named.items():
            if kept is value or kept is _inner(value):
                raise UserError(f"keep({name}=...): this object is kept already, as {other}. Keep it once")
        self.given.append(value)
        match inner := _inner(value):
            case nn.Module():
                self.modules[name] = inner
                if (wrapper := _replica(value)) is not None:
                    self.replicated[name] = wrapper
            case Optimizer():
                self._add_optimizer(name, inner)
            case LRScheduler() | ReduceLROnPlateau():
                self.schedulers[name] = SchedulerConfig(inner)
            case _:
                self._add_other(name, inner)

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        if any(kind.__name__ == _ZERO for kind in type(optimizer).__mro__):
            raise UserError(
                f"keep({name}=...): a {_ZERO} keeps a part of its state on each rank. Shard weights and state by "
                "fully_shard or loop.shard(model), and use its inner optimizer"
            )
        self.optimizers[name] = optimizer

    def _add_other(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, frozenset)):
            raise UserError(
                f"keep({name}=...): a {type(value).__name__} cannot be restored in place. Write loop.state.{name} = "
                f"{name}, and use loop.state.{name} from there on"
            )
        if isinstance(value, Stateful) and type(value).__module__.startswith("midstride."):
            self.parts[name] = value
            if (owner := getattr(value, "owner", None)) is not None:
                self.owners[name] = owner, getattr(value, "own_names", frozenset())
        elif type(value).__module__ == "accelerate.accelerator":
            self.parts[name] = AcceleratorSteps(value)
        else:
            self.others[name] = value

    @property
    def named(self) -> dict[str, Any]:
        """Every kept object by name."""
        schedulers = {name: config.scheduler for name, config in self.schedulers.items()}
        return {**self.modules, **self.optimizers, **schedulers, **self.others, **self.parts}

    def find_replicas(self) -> None:
        """Record the replicas that the script has made of kept modules, or of layers of them."""
        gc.collect()  # none that the script has dropped
        found = dict(self.live_replicas())
        self.replicated |= {path: found[path] for path in sorted(found.keys() - self.replicated.keys())}

    def live_replicas(self) -> Iterator[tuple[str, DistributedDataParallel]]:
        """Yield the replicas of kept modules, and of layers of them, with their paths."""
        paths = {id(module): path for path, module in KeptModules(self.modules).named_modules()}
        for one in _replicas():
            if id(inner := unwrapped(one)) in paths:
                yield paths[id(inner)], one

    def check(self, state: object, held: Callable[[Mapping[str, Any]], Container[int]]) -> None:
        """Check that snapshots hold what the optimizers train.

        The state of an optimizer of other tensors than parameters of kept modules is that of an object.

        Args:
            state: `loop.state`.
            held: returns the addresses of the objects that a snapshot of these objects holds.

        Raises:
            UserError: nothing is kept, or an optimizer trains parameters of no kept object.
        """
        if not self.named and not vars(state):
            raise UserError("nothing is kept: write loop.keep(model=model, optimizer=optimizer) before the loop begins")
        own = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        kept: Container[int] | None = None
        for name, optimizer in [*self.optimizers.items()]:
            given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            others = [parameter for parameter in given if id(parameter) not in own]
            if not others:
                continue
            kept = held(self.others) if kept is None else kept
            if strange := [tuple(parameter.shape) for parameter in others if id(parameter) not in kept]:
                raise UserError(
                    f"{name} ({type(optimizer).__name__}) trains {len(strange)} of {len(given)} parameters that no "
                    f"kept object holds, the first of shape {strange[0]}. Keep their module by loop.keep(model=model), "
                    "or a tensor by loop.keep(name=tensor)"
                )
            self.others[name] = self.optimizers.pop(name)


def _inner(value: Any) -> Any:
    """Return the module or optimizer inside of wrappers; other objects as they are."""
    if isinstance(value, nn.Module):
        return unwrapped(value)
    if isinstance(value, Optimizer) and is_of_fabric(value):
        name: str | None = "optimizer"
    else:
        name = _OF_ACCELERATE.get(type(value).__module__)
    return value if name is None else getattr(value, name)


def _replica(module: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` in a compiled or wrapped `module`; None without one."""
    if is_of_fabric(module):
        return next((one for one in module.modules() if isinstance(one, DistributedDataParallel)), None)
    inner = uncompiled(module)
    return inner if isinstance(inner, DistributedDataParallel) else None
