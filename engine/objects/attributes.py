"""Attributes of an object, in `__dict__` or in slots, and items of a container."""

import functools
import inspect
import queue
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from midstride.engine.metrics.torchmetrics_internals import set_anew_among

__all__ = [
    "INTERNAL",
    "attributes_of",
    "delete_attribute",
    "has_slots",
    "is_cached",
    "items_of",
    "keep_order",
    "made_by",
    "members_of",
    "new_locks",
    "own_dict",
    "set_attribute",
    "set_state_attribute",
    "state_attributes",
]

#: attributes of nn.Module itself
INTERNAL = frozenset(vars(nn.Module()))
#: attributes of nn.Module that hold state which no other part holds
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})
#: class of the standard library -> its attributes that hold locks
_LOCKS: dict[type, frozenset[str]] = {
    queue.Queue: frozenset({"mutex", "not_empty", "not_full", "all_tasks_done"}),
    threading.Event: frozenset({"_cond"}),
    threading.Semaphore: frozenset({"_cond"}),
}


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in slots, past any `__getattr__`."""
    found = dict(own_dict(value))
    for name in _slots_of(value):
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:  # not set
            continue
    return found


def own_dict(value: object) -> Mapping[str, Any]:
    """Return the `__dict__` of an object, past any `__getattr__`; empty if there is none."""
    if isinstance(value, threading.local):  # which shows it by its own means
        return value.__dict__
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, (dict, types.MappingProxyType)) else {}


def set_attribute(owner: object, name: str, value: Any) -> None:
    """Set an attribute where `attributes_of` finds it, past any `__setattr__`."""
    if name in _slots_of(owner):
        object.__setattr__(owner, name, value)
    else:
        vars(owner)[name] = value


def set_state_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object that is restored, past any `__setattr__`.

    Raises:
        AttributeError: its class has no room for it, or a property there.
    """
    if name in own_dict(owner) or isinstance(owner, nn.Module):
        set_attribute(owner, name, value)
        return
    try:
        object.__setattr__(owner, name, value)
    except TypeError:  # its base class is written in C and sets attributes by its own means, as msgspec's
        _descriptor_of(type(owner), name).__set__(owner, value)


def _descriptor_of(kind: type, name: str) -> Any:
    """Return the descriptor of an attribute in slots.

    Raises:
        AttributeError: there is none.
    """
    found = inspect.getattr_static(kind, name)
    if not isinstance(found, types.MemberDescriptorType):
        raise AttributeError(f"{kind.__name__} has no room for {name}")
    return found


def keep_order(owner: object, names: Iterable[str]) -> None:
    """Order the attributes in `vars(owner)` as in `names`, after all others."""
    own: Any = own_dict(owner)
    wanted = [name for name in names if name in own]
    among = frozenset(wanted)
    if [name for name in own if name in among] != wanted:
        for name in wanted:
            own[name] = own.pop(name)


def delete_attribute(owner: object, name: str) -> None:
    """Delete an attribute that `attributes_of` finds, past any `__delattr__`."""
    if name in _slots_of(owner):
        object.__delattr__(owner, name)
    else:
        del vars(owner)[name]


def state_attributes(value: object) -> dict[str, Any]:
    """Return an object's attributes that are state.

    Locks, nn.Module's own attributes and the `step` that a scheduler sets on its optimizer are not.
    """
    found = attributes_of(value)
    if isinstance(value, nn.Module):
        no_state = (INTERNAL - _OF_MODULES) | set_anew_among(found)
        return {name: item for name, item in found.items() if name not in no_state}
    if isinstance(value, Optimizer) and _counts_steps(found.get("step")):
        return {name: item for name, item in found.items() if name != "step"}
    owner = _lock_owner(type(value))
    return {name: item for name, item in found.items() if name not in _LOCKS[owner]} if owner else found


def _counts_steps(value: object) -> bool:
    """Return whether a scheduler of torch set `value` as its optimizer's `step`, to count calls."""
    return isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == LRScheduler.__module__


def is_cached(kind: type, name: str) -> bool:
    """Return whether the attribute `name` is the cached result of a property of `kind`."""
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def new_locks(kind: type) -> dict[str, Any]:
    """Return new locks, by attribute, for an object of a standard library class with locks."""
    owner = _lock_owner(kind)
    return {name: item for name, item in vars(owner()).items() if name in _LOCKS[owner]} if owner else {}


def _lock_owner(kind: type) -> type | None:
    return next((owner for owner in _LOCKS if issubclass(kind, owner)), None)


def made_by(kind: type) -> type:
    """Return the built-in class with the memory layout of objects of `kind`.

    >>> made_by(type("Steps", (list,), {})), made_by(type("Plain", (), {}))
    (<class 'list'>, <class 'object'>)
    """
    return next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))


def items_of(value: object) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container with keys or indices; None if `value` is none."""
    # Those that refuse to change while they are read are copied: a thread may change them meanwhile.
    if isinstance(value, Mapping):
        return [*value.items()]
    if isinstance(value, (deque, set)):
        return enumerate([*value])
    return enumerate(value) if isinstance(value, (list, tuple, frozenset)) else None


def members_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield items of a container or attributes of an object, with the code to reach each.

    >>> [*members_of({"x": 1}), *members_of([2])]
    [("['x']", 1), ('[0]', 2)]
    """
    if (items := items_of(value)) is not None:
        yield from ((f"[{key!r}]", item) for key, item in items)
    else:
        yield from ((f".{name}", item) for name, item in attributes_of(value).items())


def has_slots(value: object) -> bool:
    """Return whether the class of `value` has room for attributes outside of `__dict__`."""
    return bool(_slots_of(value))


def _slots_of(value: object) -> tuple[str, ...]:
    kind: type = type(value)
    return _slots(kind)


@lru_cache(maxsize=1024)  # asked for each object at every snapshot
def _slots(kind: type) -> tuple[str, ...]:
    found = [(base, vars(base).get("__slots__", ())) for base in kind.__mro__[:-1]]
    named = ((base, name) for base, slots in found for name in ([slots] if isinstance(slots, str) else slots))
    return tuple(_mangled(base, name) for base, name in named if name not in ("__dict__", "__weakref__"))


def _mangled(kind: type, name: str) -> str:
    """Return the mangled form of `name` in the class `kind`: `__x` becomes `_Class__x`."""
    owner = kind.__name__.lstrip("_")
    return f"_{owner}{name}" if owner and name.startswith("__") and not name.endswith("__") else name
