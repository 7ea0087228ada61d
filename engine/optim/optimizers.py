"""What `configure_optimizers` may return, read into one shape."""

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names
from midstride.engine.optim.schedulers import SchedulerConfig

__all__ = [
    "OptimizerList",
    "TrainedParameters",
    "lazy_tensors",
    "read_optimizers",
]

log = logging.getLogger(__name__)


class OptimizerList:
    """All optimizers as one part of a run's state.

    Args:
        optimizers: returns those there are; as training begins, before it gives them more to train, they are those
            that every attempt makes.
        module: what they train.
    """

    def __init__(self, optimizers: Callable[[], list[Optimizer]], module: nn.Module) -> None:
        self._now, self._module = optimizers, module
        self._kinds = [type(optimizer) for optimizer in optimizers()]
        self._trained = [
            TrainedParameters(optimizer, module, f"optimizer {number} ({type(optimizer).__name__})")
            for number, optimizer in enumerate(optimizers())
        ]

    @property
    def _optimizers(self) -> list[Optimizer]:
        optimizers = self._now()
        if (kinds := [type(optimizer) for optimizer in optimizers]) != self._kinds:
            was, now = (", ".join(kind.__name__ for kind in some) or "none" for some in (self._kinds, kinds))
            raise UserError(
                f"trainer.optimizers was replaced in training: {was} became {now}; a resumed run begins with {was}. "
                "Return them from configure_optimizers, or replace them in on_fit_start, which every attempt calls."
            )
        return optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return every optimizer's state, by number, and of which parameters it is where training changed that.

        Raises:
            UserError: one trains what is no parameter of the module: no other attempt could find it.
        """
        optimizers = self._optimizers
        states: dict[str, Any] = {str(number): _saved(number, one) for number, one in enumerate(optimizers)}
        pairs = list(enumerate(zip(optimizers, self._trained, strict=True)))
        added = {
            str(number): [trained.names(group["params"]) for group in optimizer.param_groups[trained.groups :]]
            for number, (optimizer, trained) in pairs
            if len(optimizer.param_groups) > trained.groups
        }
        moved = {str(n): names for n, (one, trained) in pairs if (names := trained.moved(one)) is not None}
        return {**states, **({"added": added} if added else {}), **({"moved": moved} if moved else {})}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Give every optimizer its state back, and first the parameters that training gave it."""
        parameters = dict(self._module.named_parameters())
        for number, (optimizer, trained) in enumerate(zip(self._optimizers, self._trained, strict=True)):
            if (moved := state_dict.get("moved", {}).get(str(number))) is not None:
                trained.move(optimizer, moved)
            added = state_dict.get("added", {}).get(str(number), [])
            state = state_dict[str(number)]
            for names in added[max(0, len(optimizer.param_groups) - trained.groups) :]:
                given: list[Any] = [parameters[name] for name in names]
                if own := state["param_groups"][len(optimizer.param_groups)].get("param_names"):
                    given = [*zip(own, given, strict=True)]
                optimizer.add_param_group({"params": given})
            _load(optimizer, state)


def _saved(number: int, optimizer: Optimizer) -> dict[str, Any]:
    try:
        return optimizer.state_dict()
    except KeyError as error:
        groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        lost = [tuple(p.shape) for p in optimizer.state if id(p) not in groups]
        if not lost:
            raise
        raise UserError(
            f"optimizer {number} ({type(optimizer).__name__}) has state of a parameter of shape {lost[0]} that is in "
            "none of its groups any more, which its state_dict cannot say. Where a parameter is taken from a group, "
            "take its state too: del optimizer.state[parameter]."
        ) from error


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give `optimizer` its state back, in the types it has: torch casts it to those of the weights.

    Tensors among its options, such as a learning rate, are on the devices where they were built.
    """
    built = [{k: v.device for k, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, devices in zip(optimizer.param_groups, built, strict=False):  # a wrapper may have more
        group.update({k: group[k].to(device) for k, device in devices.items() if isinstance(group.get(k), Tensor)})
    if not {"state", "param_groups"} <= state.keys():  # that of one that wraps another has a form of its own
        return
    numbers = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in state["state"] and parameter in optimizer.state:  # one that wraps another may keep it there
            optimizer.state[parameter] = _uncast(state["state"][number], optimizer.state[parameter])


def _uncast(saved: Any, loaded: Any) -> Any:
    """Return `loaded` where it has the types of `saved`, and elsewhere what was saved, on the device it belongs to."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if type(saved) is dict and isinstance(loaded, dict):
        return {key: _uncast(value, loaded.get(key)) for key, value in saved.items()}
    if type(saved) in (list, tuple) and len(saved) == len(loaded):
        return type(saved)(map(_uncast, saved, loaded))
    return copy.deepcopy(saved)


def read_optimizers(returned: Any, module: nn.Module) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers in what `configure_optimizers` returned.

    Raises:
        UserError: it is none of the shapes that are understood, or its parts do not belong together.
    """
    where = f"{type(module).__name__}.configure_optimizers"
    by_hand = not getattr(module, "automatic_optimization", True)
    found = ([], []) if returned is None and by_hand else _read(returned, where)
    if found is None or not (found[0] or by_hand):
        raise UserError(
            f"{where} returned {_describe(returned)}; an optimizer, a list of them, ([optimizers], [schedulers]), or "
            '{"optimizer": ..., "lr_scheduler": ...} is needed. A module that changes its weights without one sets '
            "self.automatic_optimization = False, and returns None."
        )
    optimizers, schedulers = found
    if not by_hand:
        _check_schedulers(optimizers, schedulers, where)
    return optimizers, schedulers


def _check_schedulers(optimizers: list[Optimizer], schedulers: list[SchedulerConfig], where: str) -> None:
    """Refuse schedulers that the engine would step in vain."""
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    for config in schedulers:
        name, of = type(config.scheduler).__name__, getattr(config.scheduler, "optimizer", None)
        if isinstance(of, Optimizer) and not any(id(group) in groups for group in of.param_groups):
            raise UserError(
                f"{where} returned a {name} of an optimizer that it did not return: it would change the learning rate "
                "of nothing that is stepped. Build the scheduler with the optimizer that is returned."
            )
        if config.reduce_on_plateau and config.monitor is None:
            raise UserError(
                f"{where} returned a {name} that watches nothing: say which logged value, as in "
                '{"scheduler": ..., "monitor": "val/loss"}.'
            )


def _read(returned: Any, where: str) -> tuple[list[Optimizer], list[SchedulerConfig]] | None:
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, dict) and isinstance(returned.get("optimizer"), Optimizer):
        if unknown := set(returned) - {"optimizer", "lr_scheduler", "monitor"}:
            raise UserError(f"{where} returned the keys {sorted(unknown)}; there are: lr_scheduler, monitor, optimizer")
        schedulers = (
            [_scheduler(returned["lr_scheduler"], returned.get("monitor"))] if "lr_scheduler" in returned else []
        )
        return [returned["optimizer"]], schedulers
    if not isinstance(returned, (list, tuple)):
        return None
    if all(isinstance(entry, Optimizer) for entry in returned):
        return list(returned), []
    if all(isinstance(entry, dict) for entry in returned):
        pairs = [_read(entry, where) for entry in returned]
        return None if None in pairs else ([o for p in pairs if p for o in p[0]], [s for p in pairs if p for s in p[1]])
    if len(returned) == 2 and all(isinstance(entry, (list, tuple)) for entry in returned):
        optimizers, schedulers = list(returned[0]), [_scheduler(entry) for entry in returned[1]]
        return (optimizers, schedulers) if all(isinstance(o, Optimizer) for o in optimizers) else None
    return None


def _describe(returned: Any) -> str:
    """Say what a value is made of."""
    if isinstance(returned, (list, tuple)):
        inner = ", ".join(map(_describe, returned))
        return f"[{inner}]" if isinstance(returned, list) else f"({inner})"
    if isinstance(returned, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(value)}" for key, value in returned.items()) + "}"
    return "None" if returned is None else type(returned).__name__


def lazy_tensors(module: nn.Module) -> str:
    """Return text on which parameters and buffers of `module` have no shape yet; empty if all have one."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if not lazy:
        return ""
    return (
        f"{format_names(lazy, 3)} of {type(module).__name__} have no shape yet: a lazy module gets it from its first "
        "input, and the optimizers, which come before, need it. Do one forward pass on an input of zeros at the end of "
        "__init__ or in setup: with torch.no_grad(): self(torch.zeros(2, ...)); put normalising layers into "
        "eval() for it, as they count what they see."
    )


def _scheduler(entry: Any, monitor: str | None = None) -> SchedulerConfig:
    entry = entry if isinstance(entry, dict) else {"scheduler": entry}
    known = {field.name for field in fields(SchedulerConfig)}
    if unknown := set(entry) - known:
        raise UserError(f"lr_scheduler has the keys {sorted(unknown)}; there are: {', '.join(sorted(known))}")
    scheduler = entry.get("scheduler")
    if isinstance(scheduler, Optimizer) or not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise UserError(f"lr_scheduler is {_describe(entry)}; a scheduler of torch.optim.lr_scheduler is needed.")
    if entry.get("interval", "epoch") not in ("epoch", "step"):
        raise UserError(f"lr_scheduler has interval {entry['interval']!r}; there are: epoch, step")
    frequency = entry.get("frequency", 1)
    if type(frequency) is not int or frequency < 1:
        raise UserError(
            f"lr_scheduler has frequency {frequency!r}; a whole number of epochs or steps is needed, from 1"
        )
    watches = isinstance(scheduler, ReduceLROnPlateau)
    chosen: dict[str, Any] = {"monitor": monitor, "reduce_on_plateau": watches, **entry}
    return SchedulerConfig(**chosen)


#: what parameters are called, by group; None: one that training took from its module
Names = list[list[str | None]]


class TrainedParameters:
    """The parameters in the groups that an optimizer begins with: training may swap, replace or take them away.

    Args:
        optimizer: as every attempt makes it.
        module: what it trains.
        title: what errors call it.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, title: str) -> None:
        self._module, self._title = module, title
        self._known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.groups = len(optimizer.param_groups)  #: how many there were
        self._built = self._names(optimizer)

    def moved(self, optimizer: Optimizer) -> Names | None:
        """Return what the parameters of these groups are called now; None if that is as it was.

        Raises:
            UserError: one of them is new, and no parameter of the module: no other attempt could find it.
        """
        if (now := self._names(optimizer)) == self._built:
            return None
        known = {id(parameter) for parameter in self._known}
        for group in optimizer.param_groups[: self.groups]:
            self.names([parameter for parameter in group["params"] if id(parameter) not in known])
        return now

    def move(self, optimizer: Optimizer, names: Names) -> None:
        """Let an optimizer train the parameters of these names; its state is given back after it."""
        parameters = dict(self._module.named_parameters())
        if len(names) < self.groups:  # training took the others away, and added none
            del optimizer.param_groups[len(names) :]
        for group, before, after in zip(optimizer.param_groups, self._names(optimizer), names, strict=False):
            members = group["params"]
            group["params"] = [
                parameters[name] if name else members[place] if was is None else self._apart(members[place])
                for place, (was, name) in enumerate(zip_longest(before[: len(after)], after))
            ]

    def names(self, parameters: list[Tensor]) -> list[str]:
        """Return what parameters of the module are called, those of a group that was added in training.

        Raises:
            UserError: one of them is no parameter of the module.
        """
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        if strange := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]:
            raise UserError(
                f"{self._title} was given a group of parameters in training, and those of shape {strange[0]} are not "
                "the module's: a resumed run could not find them. Assign them to the module, or give them to the "
                "optimizer in configure_optimizers."
            )
        return [names[id(parameter)] for parameter in parameters]

    def _apart(self, parameter: Tensor) -> Tensor:
        """Return a parameter that no module has, in place of one that training took from its module."""
        copy = nn.Parameter(parameter.detach().clone())
        self._known.append(copy)
        return copy

    def _names(self, optimizer: Optimizer) -> Names:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups[: self.groups]]
