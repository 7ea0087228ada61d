"""Reads `configure_optimizers`; holds optimizers' states and their trained parameters."""

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

from midstride.engine.code_origin import is_written_by_user
from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names
from midstride.engine.optim.schedulers import SchedulerConfig
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.object_nodes import kind_name, loaded
from midstride.engine.state.row_shards import is_distributed

__all__ = [
    "OptimizerList",
    "TrainedParameters",
    "lazy_tensors",
    "read_optimizers",
]

log = logging.getLogger(__name__)


class OptimizerList:
    """The states of all optimizers, as one part of the state of a run.

    Args:
        optimizers: returns the current optimizers. When this object is made they are those that every attempt makes.
        module: the module that they train.
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
                f"trainer.optimizers was replaced in training: {was} became {now}; a resumed run starts with {was}. "
                "Return them from configure_optimizers, or replace them in on_fit_start, which every attempt calls."
            )
        return optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return optimizers' states by number, and names of parameters if training changed them.

        Raises:
            UserError: an optimizer trains a tensor that is not a parameter of the module: no resumed run could find it.
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
        """Restore the parameters that training added to each optimizer, then its state."""
        parameters = ModuleIndex.of(self._module).now().parameters
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
        state: dict[str, Any] = _in_parts(optimizer.state_dict())
        return state
    except KeyError as error:
        groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        lost = [tuple(p.shape) for p in optimizer.state if id(p) not in groups]
        if not lost:
            raise
        raise UserError(
            f"optimizer {number} ({type(optimizer).__name__}) has state of a parameter of shape {lost[0]} that is no "
            "longer in its groups, which its state_dict cannot hold. When you remove a parameter from a group, remove "
            "its state: del optimizer.state[parameter]."
        ) from error


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore `optimizer` with the saved types. torch would cast its state to those of weights.

    Tensors in its options, such as a learning rate, stay on the devices where they were built.
    """
    built = [{k: v.device for k, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    state = _joined(state)
    _load_in_place(optimizer, state)
    for group, devices in zip(optimizer.param_groups, built, strict=False):  # a wrapping optimizer can have more groups
        group.update({k: group[k].to(device) for k, device in devices.items() if isinstance(group.get(k), Tensor)})
    if not {"state", "param_groups"} <= state.keys():  # a wrapping optimizer has a form of its own
        return
    numbers = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        held = getattr(optimizer, "state", ())  # a wrapping optimizer may have none, or keep others there
        if number in state["state"] and parameter in held:
            optimizer.state[parameter] = _uncast(state["state"][number], optimizer.state[parameter])


def _load_in_place(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load `state` into the groups that are there.

    torch makes new ones, but a program can hold the old ones.
    """
    own = vars(optimizer)
    groups, held = own.get("param_groups"), own.get("state")
    kept = [*optimizer.param_groups]

    def keep(loaded: Optimizer) -> None:
        if groups is None or held is None:  # properties: it wraps other optimizers
            return
        new_groups, new_state = loaded.param_groups, loaded.state
        if new_groups is not groups:
            for group, new in zip(kept, new_groups, strict=False):
                if group is not new:
                    group.clear()
                    group.update(new)
            groups[:] = [*kept[: len(new_groups)], *new_groups[len(kept) :]]
        if new_state is not held:
            held.clear()
            held.update(new_state)
        own.update(param_groups=groups, state=held)

    try:
        # Before a subclass hands them to an optimizer of its own.
        handle = optimizer.register_load_state_dict_post_hook(keep, prepend=True)
    except AttributeError:  # it was built without torch's __init__
        return optimizer.load_state_dict(state)
    try:
        optimizer.load_state_dict(state)
    finally:
        handle.remove()


#: key of the class of a tensor that a library makes of several, such as a state of 8 bits, in a saved state
_KIND = "tensor of several"
#: classes of values that are not taken apart
_WHOLE = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None)})


def _in_parts(state: Any) -> Any:
    """Return a state with the plain tensors that a library's own tensors are made of."""
    if isinstance(state, Tensor) and hasattr(state, "__tensor_flatten__") and not is_distributed(state):
        whole: Any = state
        names, context = whole.__tensor_flatten__()
        parts = {name: _in_parts(getattr(whole, name)) for name in names}
        return {_KIND: kind_name(type(whole)), "parts": parts, "context": context}
    if type(state) is not dict:
        return state
    if _WHOLE.issuperset(map(type, state.values())):  # true of most
        return dict(state)  # another part may hold the optimizer's own dict: they would be one dict when they are read
    return {key: _in_parts(value) for key, value in state.items()}


def _joined(state: Any) -> Any:
    """Return the state whose parts `_in_parts` returned.

    Raises:
        UserError: no loaded module has the class of a tensor.
    """
    if type(state) is not dict:
        return state
    if _KIND not in state:
        return {key: _joined(value) for key, value in state.items()}
    kind: Any = loaded(state[_KIND])
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise UserError(
            f"the snapshot has optimizer state of class {state[_KIND]}, which is not loaded: build the optimizer that "
            "the run was trained with"
        )
    made: Any = kind
    return made.__tensor_unflatten__(_joined(state["parts"]), state["context"], None, None)


def _uncast(saved: Any, loaded: Any) -> Any:
    """Return `loaded` with the types of `saved`. A tensor of another type is taken from `saved`."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if type(saved) is dict and isinstance(loaded, dict):
        if not saved.keys() <= loaded.keys():  # a form for files alone, as of 8-bit optimizers, which wrap some entries
            wrapped = [
                inner
                for key, value in saved.items()
                if key not in loaded and type(value) is dict
                for inner in value.items()
            ]
            saved = {**{key: value for key, value in saved.items() if key in loaded}, **dict(wrapped)}
        return {key: _uncast(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if type(saved) in (list, tuple) and len(saved) == len(loaded):
        return type(saved)(map(_uncast, saved, loaded))
    return copy.deepcopy(saved)


def read_optimizers(returned: Any, module: nn.Module) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers in the result of `configure_optimizers`.

    Raises:
        UserError: the result has no supported form, or its parts do not belong together.
    """
    where = f"{type(module).__name__}.configure_optimizers"
    by_hand = not getattr(module, "automatic_optimization", True)
    # A library's module may train without an optimizer, as memory banks do; of a user's, a return is missing.
    is_meant = by_hand or not is_written_by_user(module, "configure_optimizers")
    found = ([], []) if returned is None and is_meant else _read(returned, where)
    if found is None or not (found[0] or is_meant):
        raise UserError(
            f"{where} returned {_describe(returned)}; return an optimizer, a list of them, ([optimizers], "
            '[schedulers]), or {"optimizer": ..., "lr_scheduler": ...}. For weights without an optimizer, set '
            "self.automatic_optimization = False and return None."
        )
    optimizers, schedulers = found
    if not by_hand:
        _check_schedulers(optimizers, schedulers, where)
    return optimizers, schedulers


def _check_schedulers(optimizers: list[Optimizer], schedulers: list[SchedulerConfig], where: str) -> None:
    """Refuse schedulers without effect."""
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    for config in schedulers:
        name, of = type(config.scheduler).__name__, getattr(config.scheduler, "optimizer", None)
        if isinstance(of, Optimizer) and not any(id(group) in groups for group in of.param_groups):
            raise UserError(
                f"{where} returned a {name} of an optimizer that it did not return: the scheduler would have no "
                "effect. Build it with the returned optimizer."
            )
        if config.reduce_on_plateau and config.monitor is None:
            raise UserError(
                f"{where} returned a {name} without a monitored value: name a logged value, as in "
                '{"scheduler": ..., "monitor": "val/loss"}.'
            )


def _read(returned: Any, where: str) -> tuple[list[Optimizer], list[SchedulerConfig]] | None:
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, dict) and isinstance(returned.get("optimizer"), Optimizer):
        if unknown := set(returned) - {"optimizer", "lr_scheduler", "monitor"}:
            raise UserError(
                f"{where} returned the keys {sorted(unknown)}: choose from lr_scheduler, monitor, optimizer"
            )
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
    """Return the structure of a value, for messages."""
    if isinstance(returned, (list, tuple)):
        inner = ", ".join(map(_describe, returned))
        return f"[{inner}]" if isinstance(returned, list) else f"({inner})"
    if isinstance(returned, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(value)}" for key, value in returned.items()) + "}"
    if isinstance(returned, type):
        return f"the class {returned.__name__}"
    return "None" if returned is None else type(returned).__name__


def lazy_tensors(module: nn.Module) -> str:
    """Return a message on parameters and buffers of `module` without a shape; "" without any."""
    members = ModuleIndex.of(module).now()
    lazy = [name for name, tensor in (members.parameters | members.buffers).items() if is_lazy(tensor)]
    if not lazy:
        return ""
    return (
        f"{format_names(lazy, 3)} of {type(module).__name__} have no shape yet: lazy modules get it from their first "
        "input, and optimizers need it before. Run one forward pass on zeros at the end of __init__ or in setup: "
        "with torch.no_grad(): self(torch.zeros(2, ...)). Put normalising layers into eval() for it, since they update "
        "statistics."
    )


def _scheduler(entry: Any, monitor: str | None = None) -> SchedulerConfig:
    entry = entry if isinstance(entry, dict) else {"scheduler": entry}
    known = {field.name for field in fields(SchedulerConfig)}
    if unknown := set(entry) - known:
        raise UserError(f"lr_scheduler has the keys {sorted(unknown)}: choose from {', '.join(sorted(known))}")
    scheduler = entry.get("scheduler")
    if isinstance(scheduler, Optimizer) or not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        order = "optimizers come first: [optimizers], [schedulers]"
        way = order if isinstance(scheduler, Optimizer) else "use a scheduler of torch.optim.lr_scheduler"
        raise UserError(f"lr_scheduler is {_describe(entry)}; {way}.")
    if entry.get("interval", "epoch") not in ("epoch", "step"):
        raise UserError(f"lr_scheduler has interval {entry['interval']!r}: choose epoch or step")
    frequency = entry.get("frequency", 1)
    if type(frequency) is not int or frequency < 1:
        raise UserError(f"lr_scheduler has frequency {frequency!r}; use a whole number of epochs or steps, from 1")
    watches = isinstance(scheduler, ReduceLROnPlateau)
    chosen: dict[str, Any] = {"monitor": monitor, "reduce_on_plateau": watches, **entry}
    return SchedulerConfig(**chosen)


#: names of parameters by group; None for a parameter that training removed from its module
Names = list[list[str | None]]


class TrainedParameters:
    """Parameters in an optimizer's first groups. Training can swap, replace or remove them.

    Args:
        optimizer: as every attempt makes it.
        module: the module that it trains.
        title: name of the optimizer in errors.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, title: str) -> None:
        self._module, self._index, self._title = module, ModuleIndex.of(module), title
        self._known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.groups = len(optimizer.param_groups)  #: number of first groups
        self._built = self._names(optimizer)
        self._as_built = self._version_of(optimizer)

    def moved(self, optimizer: Optimizer) -> Names | None:
        """Return the names of the parameters in these groups; None if they are unchanged.

        Raises:
            UserError: a new one is not a parameter of the module: no resumed run could find it.
        """
        if (version := self._version_of(optimizer)) == self._as_built:
            return None
        if (now := self._names(optimizer)) == self._built:
            self._as_built = version
            return None
        known = {id(parameter) for parameter in self._known}
        for group in optimizer.param_groups[: self.groups]:
            self.names([parameter for parameter in group["params"] if id(parameter) not in known])
        return now

    def move(self, optimizer: Optimizer, names: Names) -> None:
        """Let an optimizer train the parameters of these names; its state is restored afterwards."""
        parameters = self._index.now().parameters
        if len(names) < self.groups:  # training removed the others and added none
            del optimizer.param_groups[len(names) :]
        for group, before, after in zip(optimizer.param_groups, self._names(optimizer), names, strict=False):
            members = group["params"]
            group["params"] = [
                parameters[name] if name else members[place] if was is None else self._apart(members[place])
                for place, (was, name) in enumerate(zip_longest(before[: len(after)], after))
            ]

    def names(self, parameters: list[Tensor]) -> list[str]:
        """Return the names of `parameters` in the module, for a group that training added.

        Raises:
            UserError: one of them is not a parameter of the module.
        """
        names = {id(parameter): name for name, parameter in self._index.now().parameters.items()}
        if strange := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]:
            raise UserError(
                f"{self._title} got a group of parameters in training, and one of shape {strange[0]} is not the "
                "module's: a resumed run could not find it. Assign it to the module, or pass it to the optimizer in "
                "configure_optimizers."
            )
        return [names[id(parameter)] for parameter in parameters]

    def _apart(self, parameter: Tensor) -> Tensor:
        """Return a parameter outside the module, in place of one that training removed from it."""
        copy = nn.Parameter(parameter.detach().clone())
        self._known.append(copy)
        return copy

    def _version_of(self, optimizer: Optimizer) -> tuple[int, list[list[int]]]:
        """Return the version of the module's members and the ids of the parameters.

        While they stay, the names stay.
        """
        groups = optimizer.param_groups[: self.groups]
        return self._index.now().version, [[*map(id, group["params"])] for group in groups]

    def _names(self, optimizer: Optimizer) -> Names:
        names = {id(parameter): name for name, parameter in self._index.now().parameters.items()}
        return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups[: self.groups]]
