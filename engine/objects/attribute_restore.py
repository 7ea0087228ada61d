"""Restores the attributes and the class of a live object, and builds objects that do not exist yet."""

import sys
import types
from collections import OrderedDict, deque
from functools import lru_cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from midstride.engine.code_origin import is_user_class
from midstride.engine.metrics.torchmetrics_internals import is_kind_of_metric, set_anew, set_anew_among
from midstride.engine.objects.attributes import delete_attribute, new_locks, set_attribute, state_attributes
from midstride.engine.objects.containers import MISSING, Restore
from midstride.engine.objects.data_sets import TORCH_DATA
from midstride.engine.objects.plain_values import kind_name, step

__all__ = ["KNOWN", "NAMESPACES", "class_called", "fill_attributes", "fresh", "is_made_anew", "keep_order", "set_class"]

#: classes of torch whose objects can be rebuilt
_MADE_ANEW = (nn.Module, Optimizer, LRScheduler)
#: classes of libraries whose attributes and items are all of their state
NAMESPACES = frozenset(
    {
        *("types:SimpleNamespace", "argparse:Namespace", "collections:UserDict", "collections:UserList"),
        *("collections:UserString", "collections:ChainMap"),
        *("queue:LifoQueue", "queue:PriorityQueue", "queue:Queue", "threading:Event"),
        *("lightning.fabric.utilities.data:AttributeDict", "lightning_fabric.utilities.data:AttributeDict"),
        "midstride.engine:Hyperparameters",
        *map(kind_name, TORCH_DATA),
    }
)
#: base classes whose attributes and items are all of their state
KNOWN = (object, list, dict, set, deque, types.SimpleNamespace)
_NEW = tuple(kind.__new__ for kind in KNOWN)


def class_called(kind: str, live: Any, base: type) -> Any:
    """Return the class called `kind`: that of the live object, or a loaded one of the user's; None if there is none."""
    if live is not MISSING and kind_name(type(live)) == kind:
        return type(live)
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    for inner in name.split("."):
        found = getattr(found, inner, None)
    if not isinstance(found, type) or not issubclass(found, base):
        return None
    is_known = issubclass(found, _MADE_ANEW) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    return found if is_known or is_user_class(found) or kind in NAMESPACES else None


def set_class(owner: object, kind: str) -> bool:
    """Set the class of a live object to the class called `kind`; return whether it has that class now."""
    if kind_name(type(owner)) == kind:
        return True
    try:
        object.__setattr__(owner, "__class__", class_called(kind, MISSING, object))
    except TypeError:  # there is none, or objects of it are laid out otherwise
        return False
    return True


@lru_cache(maxsize=1024)  # asked for each object at every snapshot
def is_made_anew(kind: type) -> bool:
    """Return whether another attempt can rebuild an object of `kind` without running the code that made it."""
    return class_called(kind_name(kind), MISSING, object) is kind and kind.__new__ in _NEW


def fresh(kind: Any) -> Any:
    """Return an object of `kind` without a call of `__init__`; None if there is no such class."""
    if kind is None or kind.__new__ not in _NEW:
        return None
    made = kind.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    if is_kind_of_metric(kind):
        set_anew(made)
    for name, lock in new_locks(kind).items():
        object.__setattr__(made, name, lock)
    return made


def fill_attributes(restore: Restore, nodes: dict[str, Any], live: Any, path: str) -> None:
    """Set the attributes of a live object to those that `nodes` describe; each fills its live value in place."""
    before, set_by_class = state_attributes(live), set_anew_among(nodes)
    for name, child in nodes.items():
        if name in set_by_class:  # described by an earlier version
            restore.read_back()
            continue
        if restore.change.drops(path, name) or restore.change.replaces(path, name, child):
            restore.skip(child, step(path, name))
            continue
        _fill_attribute(restore, child, live, name, before.get(name, MISSING), path)
    for name in before.keys() - nodes.keys():
        if not restore.change.adds(path, name):
            delete_attribute(live, name)
    if not keep_order(live, nodes):
        restore.read_back()


def keep_order(owner: object, nodes: dict[str, Any]) -> bool:
    """Order the attributes in `vars(owner)` as in `nodes`, after all others.

    Returns:
        Whether `nodes` has an order: earlier versions wrote attributes by name, and then nothing is changed.
    """
    if not isinstance(nodes, OrderedDict):
        return False
    own: dict[str, Any] = getattr(owner, "__dict__", {})
    wanted = [name for name in nodes if name in own]
    if [name for name in own if name in nodes] != wanted:
        for name in wanted:
            own[name] = own.pop(name)
    return True


def _fill_attribute(restore: Restore, node: Any, owner: object, name: str, before: Any, path: str) -> None:
    after = restore.put(node, before, step(path, name))
    if after is before or after is MISSING:
        return
    try:
        _set_attribute(owner, name, after)
    except AttributeError:  # its class has no room for it, or a property there
        restore.mark_stale(step(path, name), "set", MISSING)


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute past any `__setattr__`."""
    if name in getattr(owner, "__dict__", {}) or isinstance(owner, nn.Module):
        set_attribute(owner, name, value)
    else:
        object.__setattr__(owner, name, value)
