"""The objects that a loop keeps: modules, optimizers, schedulers and others with a state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from midstride.engine.errors import UserError
from midstride.engine.modules.torch_internals import children_of, uncompiled
from midstride.engine.optim.schedulers import SchedulerConfig

__all__ = ["Kept", "KeptModules", "unwrapped"]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of `DistributedDataParallel` and `torch.compile`."""
    inner = module.module if isinstance(module, DistributedDataParallel) else uncompiled(module)
    return module if inner is module else unwrapped(inner)


class KeptModules(nn.Module):
    """The kept modules as one, each under its name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        children_of(self).update(modules)


@dataclass
class Kept:
    """The objects given to `Loop.keep`, by name and by kind."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    #: the modules that exchange gradients by themselves, by the names under which they were kept
    replicated: dict[str, DistributedDataParallel] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    schedulers: dict[str, SchedulerConfig] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Keep `value` under `name`.

        Raises:
            UserError: the name is taken, or the same object was kept under another name.
        """
        if name in self.named:
            raise UserError(f"keep({name}=...): {name} is kept already. Use another name")
        for other, kept in self.named.items():
            if kept is value or (isinstance(value, nn.Module) and unwrapped(value) is kept):
                raise UserError(f"keep({name}=...): this object is kept already, as {other}. Keep it once")
        match value:
            case nn.Module():
                self.modules[name] = unwrapped(value)
                if (wrapper := _replica(value)) is not None:
                    self.replicated[name] = wrapper
            case Optimizer():
                self.optimizers[name] = value
            case LRScheduler() | ReduceLROnPlateau():
                self.schedulers[name] = SchedulerConfig(value)
            case _:
                self._add_other(name, value)

    def _add_other(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, frozenset)):
            raise UserError(
                f"keep({name}=...): a {type(value).__name__} cannot be restored in place. Write loop.state.{name} = "
                f"{name}, and use loop.state.{name} from there on"
            )
        self.others[name] = value

    @property
    def named(self) -> dict[str, Any]:
        """Every kept object by name."""
        schedulers = {name: config.scheduler for name, config in self.schedulers.items()}
        return {**self.modules, **self.optimizers, **schedulers, **self.others}

    def check(self) -> None:
        """Check that the modules hold what the optimizers train.

        Raises:
            UserError: nothing is kept, or an optimizer trains parameters of no kept module.
        """
        if not self.modules and not self.others:
            raise UserError("nothing is kept: write loop.keep(model=model, optimizer=optimizer) before the loop begins")
        own = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        for name, optimizer in self.optimizers.items():
            given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if strange := [tuple(parameter.shape) for parameter in given if id(parameter) not in own]:
                raise UserError(
                    f"{name}, a {type(optimizer).__name__}, trains {len(strange)} of {len(given)} parameters that are "
                    f"of no kept module, the first of shape {strange[0]}. Keep their module: loop.keep(model=model)"
                )


def _replica(module: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` in a compiled or plain `module`; None without one."""
    inner = uncompiled(module)
    return inner if isinstance(inner, DistributedDataParallel) else None
