"""What is directly in an object: its attributes, wherever its class keeps them, or the items of a container."""

import queue
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from midstride.engine.metrics.torchmetrics_internals import set_anew_among

__all__ = [
    "INTERNAL",
    "attributes_of",
    "delete_attribute",
    "items_of",
    "made_by",
    "members_of",
    "new_locks",
    "set_attribute",
    "state_attributes",
]

#: what nn.Module keeps of its own
INTERNAL = frozenset(vars(nn.Module()))
#: of these, those that hold state of a module that no other part keeps
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})
#: locks that a class of Python's keeps beside its state
_LOCKS: dict[type, frozenset[str]] = {
    queue.Queue: frozenset({"mutex", "not_empty", "not_full", "all_tasks_done"}),
    threading.Event: frozenset({"_cond"}),
}


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object by name, those in slots included."""
    found = dict(getattr(value, "__dict__", {}))
    for name in _slots_of(value):
        try:
            found[name] = getattr(value, name)
        except AttributeError:  # not set
            continue
    return found


def set_attribute(owner: object, name: str, value: Any) -> None:
    """Set an attribute where `attributes_of` finds it, past any `__setattr__`."""
    if name in _slots_of(owner):
        object.__setattr__(owner, name, value)
    else:
        vars(owner)[name] = value


def delete_attribute(owner: object, name: str) -> None:
    """Delete an attribute that `attributes_of` finds, past any `__delattr__`."""
    if name in _slots_of(owner):
        object.__delattr__(owner, name)
    else:
        del vars(owner)[name]


def state_attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object; of a module, those that hold its state; no locks of Python's own."""
    found = attributes_of(value)
    if isinstance(value, nn.Module):
        no_state = (INTERNAL - _OF_MODULES) | set_anew_among(found)
        return {name: item for name, item in found.items() if name not in no_state}
    owner = _lock_owner(type(value))
    return {name: item for name, item in found.items() if name not in _LOCKS[owner]} if owner else found


def new_locks(kind: type) -> dict[str, Any]:
    """Return, by attribute, new locks of those that a class of Python's keeps beside its state."""
    owner = _lock_owner(kind)
    return {name: item for name, item in vars(owner()).items() if name in _LOCKS[owner]} if owner else {}


def _lock_owner(kind: type) -> type | None:
    return next((owner for owner in _LOCKS if issubclass(kind, owner)), None)


def made_by(kind: type) -> type:
    """Return the class that objects of `kind` are in memory: what it holds itself stands in no attribute.

    >>> made_by(type("Steps", (list,), {})), made_by(type("Plain", (), {}))
    (<class 'list'>, <class 'object'>)
    """
    return next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))


def items_of(value: object) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container with their keys or numbers; None if `value` is no container."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, set, frozenset, deque)) else None


def members_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield what is directly in a container or an object, each with how code reaches it from there.

    >>> [*members_of({"x": 1}), *members_of([2])]
    [("['x']", 1), ('[0]', 2)]
    """
    if (items := items_of(value)) is not None:
        yield from ((f"[{key!r}]", item) for key, item in items)
    else:
        yield from ((f".{name}", item) for name, item in attributes_of(value).items())


def _slots_of(value: object) -> tuple[str, ...]:
    kind: type = type(value)
    return _slots(kind)


@lru_cache(maxsize=1024)  # asked for each object at every snapshot
def _slots(kind: type) -> tuple[str, ...]:
    found = [(base, vars(base).get("__slots__", ())) for base in kind.__mro__[:-1]]
    named = ((base, name) for base, slots in found for name in ([slots] if isinstance(slots, str) else slots))
    return tuple(_mangled(base, name) for base, name in named if name not in ("__dict__", "__weakref__"))


def _mangled(kind: type, name: str) -> str:
    """Return how Python calls `name`, written in the body of the class `kind`: `__x` is another name in each class."""
    owner = kind.__name__.lstrip("_")
    return f"_{owner}{name}" if owner and name.startswith("__") and not name.endswith("__") else name
