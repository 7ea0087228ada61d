"""Objects that consist of attributes and items: the user's, modules, torch's data sets."""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from midstride.engine.errors import UnsupportedState, UserCodeError
from midstride.engine.objects.attributes import state_attributes
from midstride.engine.objects.classes import (
    BASES,
    TORCH_DATA,
    can_be_fresh,
    class_called,
    fresh,
    is_library,
    is_made_anew,
)
from midstride.engine.objects.kinds.containers import WITH_ITEMS, describe_items, restore_items
from midstride.engine.objects.kinds.kind import MISSING, Kind, is_alike
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.object_nodes import Instance, kind_name, step
from midstride.engine.state.stateful import Stateful

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["DataSets", "DerivedValues", "UserObjects"]

#: classes whose `state_dict` other parts of a snapshot hold
_SAVED_APART = (nn.Module, Optimizer, LRScheduler)


class UserObjects(Kind):
    """Objects with attributes, and with items if their class is derived from a container."""

    form = "object"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is the user's, or one of a library of which this is known."""
        return not is_library(kind)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of attributes and items."""
        walk.meet(value, path)
        kind: type = type(value)
        if not is_made_anew(kind):
            walk.constants[path] = kind_name(kind)
        if walk.is_in_library:
            with walk.inside(is_library=False):
                return self.described(walk, value, path)
        return self.described(walk, value, path)

    def held(self, walk: "GraphWalk", value: Any) -> dict[str, Any]:
        """Return the attributes that are state, by name."""
        return state_attributes(value)

    def described(self, walk: "GraphWalk", value: Any, path: str) -> Instance:
        """Return the node of an object that the walk has met."""
        node = self.instance(value, attributes=walk.attributes(self.held(walk, value), path))
        if issubclass(type(value), WITH_ITEMS):  # a proxy says another's class
            node.state["items"] = describe_items(walk, value, step(path, "items"))
        if (own := _own_state(walk, value, path)) is not None:
            node.state["own"] = own
        return node

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield attributes and items."""
        before = {} if live is MISSING else state_attributes(live)
        yield from ((part, before.get(name, MISSING)) for name, part in node.state["attributes"].items())
        yield node.state.get("items"), live

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return a lost part; a lost attribute of a user's live object leaves its others."""
        is_late = is_late or not is_alike(node, live)
        if is_alike(node, live):
            if not is_library(type(live)):
                return None
        elif not can_be_fresh(class_called(node.kind, MISSING, object)):
            return node
        return super().lost_part(restore, node, live, is_late=is_late)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill an object in place, or make one; a new one, or a library's, whole or not at all."""
        if restore.keep_whole(node, live, path):
            return live
        if not restore.claim(live, path, fits=is_alike(node, live)):
            live = restore.record(fresh(class_called(node.kind, live, object)), path)
            if live is None:
                return restore.mark_stale(path, node.kind, MISSING)
        if "own" in node.state:
            _load_own_state(live, node.state["own"])
        restore.attributes(node.state["attributes"], live, path)
        if "items" in node.state:
            restore_items(restore, node.state["items"], live, step(path, "items"))
        return live


def _own_state(walk: "GraphWalk", value: Any, path: str) -> Any:
    """Return `value.state_dict()` of a user's class if no file can hold some attributes.

    Such an object, as of a simulator in another process, is rebuilt by its own `load_state_dict`. In data, readers
    start with each pass.

    Raises:
        UnsupportedState: the result cannot be written.
        UserCodeError: `state_dict` failed.
    """
    kind = type(value)
    if not issubclass(kind, Stateful) or issubclass(kind, _SAVED_APART) or walk.is_small or walk.is_quiet:
        return None
    unwritable = [one for one in walk.opaque if one.startswith(f"{path}/")]
    if not unwritable:
        return None
    try:
        state = value.state_dict()
        encode_lazily(state)
    except UnsupportedState as error:
        raise UnsupportedState(f"{kind.__name__}.state_dict: {error}") from error
    except Exception as error:
        raise UserCodeError.of(f"{kind.__name__}.state_dict, for a snapshot", error) from error
    for one in unwritable:
        del walk.opaque[one]
    return state


def _load_own_state(live: Any, state: Any) -> None:
    """Call `live.load_state_dict`; attributes that a file can hold are restored after it."""
    try:
        live.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise UserCodeError.of(f"{type(live).__name__}.load_state_dict, on a resume", error) from error


class DataSets(UserObjects):
    """Data sets of torch; large values in them are left out."""

    types = TORCH_DATA

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is one of these data sets."""
        return kind in self.types

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the attributes."""
        with walk.without_large():
            return super().describe(walk, value, path)


class DerivedValues(Kind):
    """Objects of a user's class that is derived from an immutable built-in type."""

    form = "derived"
    is_filled = False

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is the user's and derived from such a type."""
        return issubclass(kind, BASES) and not is_library(kind)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of the value as of the built-in type, and those of the attributes."""
        walk.meet(value, path)
        base: Any = next(kind for kind in BASES if isinstance(value, kind))
        arguments = [value] if base is frozenset else base.__getnewargs__(value)
        plain = base(*arguments)
        attributes = walk.attributes(state_attributes(value), path)
        return self.instance(value, base=walk.node(plain, step(path, "base")), attributes=attributes)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return a new object."""
        kind = class_called(node.kind, live, object)
        plain = restore.value(node.state["base"], MISSING, step(path, "base"))
        base: Any = type(plain)
        if kind is None or not issubclass(kind, base):
            return restore.mark_stale(path, node.kind, live)
        made = restore.record(base.__new__(kind, plain), path)
        restore.attributes(node.state["attributes"], made, path)
        return made
