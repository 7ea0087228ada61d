"""Objects of libraries: by their `state_dict`, or by their class, with a report of changes."""

import copy
import enum
import inspect
import logging
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from torch import Tensor, nn
from torch.utils.data import Dataset

from midstride.engine.code_origin import is_user_class, module_of
from midstride.engine.objects.attributes import attributes_of, is_cached, made_by
from midstride.engine.objects.classes import (
    has_attributes,
    is_made_anew,
    keeps_attributes,
    sets_state,
    states_attributes,
)
from midstride.engine.objects.kinds.generators import Generator
from midstride.engine.objects.kinds.kind import Kind, is_alike
from midstride.engine.objects.kinds.opaque import OPAQUE, Opaque, compared_node
from midstride.engine.objects.kinds.plain import PLAIN, VALUES
from midstride.engine.objects.kinds.reduced import Reduced, is_reduced
from midstride.engine.objects.kinds.tensors import tensors_in
from midstride.engine.objects.kinds.user_objects import UserObjects
from midstride.engine.state.codec import encode
from midstride.engine.state.differences import differences
from midstride.engine.state.object_nodes import Instance, kind_name
from midstride.engine.state.stateful import Stateful

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["DEPTH", "MANY", "AttributeObjects", "Graphs", "LibraryObjects", "Pipelines", "Statefuls", "is_comparable"]

#: levels that a digest (`objects.digest`) tells, and items of a container: of a larger one with numbers and text it
#: tells one line, and of others no more are read
DEPTH, MANY = 5, 1000


class Statefuls(Kind):
    """Objects of a library with `state_dict` and `load_state_dict`, such as a gradient scaler."""

    form = "stateful"

    def matches(self, kind: type) -> bool:
        """Return whether objects of `kind` have both methods."""
        return issubclass(kind, Stateful)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the object's own state; of a container of values, such as a TensorDict, its parts."""
        if hasattr(type(value), "__setitem__") and is_reduced(walk, value):
            return _REDUCED.describe(walk, value, path)
        if walk.is_late(value) and keeps_attributes(type(value)):
            return _ATTRIBUTES.describe(walk, value, path)
        try:
            state = _without_graphs(value.state_dict())
            encode(state)
        except Exception:  # it has none yet, or none that can be written
            return _of_attributes(value).describe(walk, value, path)
        walk.meet(value, path)
        walk.constants[path] = kind_name(type(value))
        return self.instance(value, state=state)

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return the node if no such object is there to load the state."""
        return None if is_alike(node, live) else node

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Load the state into the live object, if it has another."""
        if not restore.claim(live, path, fits=is_alike(node, live)):
            return restore.mark_stale(path, node.kind, live)
        if differences(live.state_dict(), node.state["state"]):
            try:
                live.load_state_dict(copy.deepcopy(node.state["state"]))
            except Exception as error:  # such as of another structure, which training has made
                return restore.mark_stale(path, f"{node.kind}, which raised {type(error).__name__}", live)
        return live


class Pipelines(Opaque):
    """Pipelines of torchdata; if asked for its state, one begins to read."""

    is_described = True

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is one of torchdata's."""
        return module_of(kind).startswith("torchdata.nodes")

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the class; in data, of which copies are read, the loader keeps the position."""
        if not walk.is_small:
            return super().describe(walk, value, path)
        walk.meet(value, path)
        return self.instance(value)


class Graphs(Opaque):
    """Graphs of torch.fx, which each attempt traces again."""

    is_described = True

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is torch's class, whose module takes seconds to load."""
        return kind_name(kind) == "torch.fx.graph:Graph"

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the class; the nodes are compared, to say that training has changed them."""
        walk.meet(value, path)
        nodes = repr([(node.op, node.target, node.args, node.kwargs) for node in value.nodes])
        walk.constants[path] = f"{kind_name(type(value))} {xxhash.xxh3_64_hexdigest(nodes.encode())}"
        return self.instance(value)


class AttributeObjects(UserObjects):
    """Objects of libraries whose attributes are all of their state, such as a transform."""

    def matches(self, kind: type) -> bool:
        """Return whether this is known of `kind`."""
        return keeps_attributes(kind)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of attributes and items."""
        kind: type = type(value)
        if sets_state(kind) and is_reduced(walk, value):
            return _REDUCED.describe(walk, value, path)
        walk.meet(value, path)
        if not is_made_anew(kind):
            walk.constants[path] = kind_name(kind)
        is_quiet = walk.is_quiet or walk.is_small or callable(value) or issubclass(kind, Dataset)
        with walk.inside(is_library=True, is_quiet=is_quiet):
            return self.described(walk, value, path)

    def held(self, walk: "GraphWalk", value: Any) -> dict[str, Any]:
        """Return the attributes, without views of the object that its properties have cached."""
        found, kind = super().held(walk, value), type(value)
        known = {id(value), *map(id, found.values())}
        return {
            name: item
            for name, item in found.items()
            if walk.is_described(type(item)) or not (is_cached(kind, name) and _is_view(item, known))
        }


def _is_view(value: object, known: Container[int]) -> bool:
    """Return whether `value` holds only objects in `known`, their methods, and plain values."""
    parts = [part for part in attributes_of(value).values() if type(part) not in PLAIN]
    owners = [part.__self__ if isinstance(part, _METHODS) else part for part in parts]
    return bool(parts) and all(id(owner) in known for owner in owners)


class LibraryObjects(Opaque):
    """All other objects: if the attributes of one are all that it holds, changes are reported."""

    def matches(self, kind: type) -> bool:
        """Return True."""
        return True

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the class, or the nodes of the attributes if these are all that pickle would keep."""
        if states_attributes(value):
            return _ATTRIBUTES.describe(walk, value, path)
        if id(value) not in walk.anchors and is_reduced(walk, value):
            return _REDUCED.describe(walk, value, path)
        is_compared = is_comparable(value, walk.anchors)
        return compared_node(walk, value, path) if is_compared else super().describe(walk, value, path)


_ATTRIBUTES, _REDUCED = AttributeObjects(), Reduced()


def _without_graphs(state: Any) -> Any:
    """Return `state` with tensors that a step has computed cut off from it."""
    computed = {id(tensor): tensor.detach() for tensor in tensors_in(state) if tensor.grad_fn is not None}
    return copy.deepcopy(state, {id(one): one for one in tensors_in(state)} | computed) if computed else state


def _of_attributes(value: object) -> Kind:
    """Return the kind of an object whose own state cannot be written."""
    return _ATTRIBUTES if keeps_attributes(type(value)) else OPAQUE


#: classes of which a digest tells all that may change
_LEAVES: Any = (
    *(*PLAIN, Tensor, np.ndarray, np.generic, np.dtype, enum.Enum, Generator),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger, inspect.Signature),
    *(types.GenericAlias, types.UnionType),
)
_METHODS = (types.MethodType, types.BuiltinMethodType)
_SETS = (set, frozenset)
_CONTAINERS = (list, tuple, dict, deque, OrderedDict, defaultdict, *_SETS)


def is_comparable(value: object, anchors: Container[int]) -> bool:
    """Return whether a digest of `value`, an object of a library, shows every change of it.

    It does not of an object that can be closed or is written in C, nor where one is held; and it would show changes of
    objects in other parts of the state, such as weights, and of the user's objects.

    Args:
        value: the object.
        anchors: ids of objects in other parts of the state.
    """
    return _is_told(value, DEPTH, anchors, set())


def _is_told(value: Any, depth: int, anchors: Container[int], seen: set[int]) -> bool:
    kind: type = type(value)  # a weak proxy says another's class, or fails
    if id(value) in anchors or issubclass(kind, (nn.Module, nn.Parameter)) or is_user_class(kind):
        return False
    is_constant = issubclass(kind, _LEAVES) or kind in VALUES or kind.__module__ == "typing"
    if is_constant or id(value) in seen:
        return True
    seen.add(id(value))
    members = _members(value, kind)
    return depth > 0 and members is not None and all(_is_told(item, depth - 1, anchors, seen) for item in members)


def _members(value: Any, kind: type) -> Iterable[Any] | None:
    """Return the items or attributes of `value`; None if incomplete or too many for a digest."""
    if kind in _CONTAINERS or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        is_told = PLAIN.issuperset(map(type, value)) if kind in _SETS else len(value) <= MANY
        return (value.values() if issubclass(kind, dict) else value) if is_told else None
    # Of what can be closed, such as a database, attributes do not show the content.
    is_of_attributes = made_by(kind) in (object, types.SimpleNamespace) and not hasattr(kind, "close")
    return attributes_of(value).values() if is_of_attributes and has_attributes(kind) else None
