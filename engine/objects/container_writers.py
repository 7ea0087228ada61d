"""Writers that describe containers, and objects of which only the class is known."""

import inspect
import logging
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from midstride.engine.objects.hashed_items import is_writable_item
from midstride.engine.objects.plain_values import PLAIN, is_plain_key, key_path, kind_name, step, value_path
from midstride.engine.state.codec import FACTORIES
from midstride.engine.state.hash_table import described_table
from midstride.engine.state.object_nodes import Instance, Same, View, kind_text

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "CONSTANT",
    "Walk",
    "bytes_node",
    "compared_node",
    "deque_node",
    "dict_node",
    "instance_of",
    "item_nodes",
    "list_node",
    "opaque_node",
    "pipeline_node",
    "set_node",
    "tuple_node",
]

#: types of constants in code, which every attempt has
CONSTANT = (type, types.ModuleType, logging.Logger, property, inspect.Signature, RemovableHandle)
#: class of the trainer that a previously trained module, such as a teacher, may hold
_TRAINER = "midstride.engine:Trainer"
#: package whose objects each attempt makes anew as it compiles
_COMPILED = "torch._dynamo."


class Walk(Protocol):
    """The methods of a `GraphWalk` that writers of nodes call."""

    anchors: Mapping[int, str]
    is_small: bool
    opaque: dict[str, object]
    constants: dict[str, str]
    compared: dict[str, object]
    functions: set[str]

    def node(self, value: Any, path: str) -> Any:
        """Return the node of `value` at `path`."""
        ...

    def meet(self, value: object, path: str) -> None:
        """Record `value` as the value at `path`."""
        ...

    def without_large(self) -> AbstractContextManager[None]:
        """Leave out large values in the block."""
        ...

    def attributes(self, values: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the nodes of attributes."""
        ...

    def is_address(self, value: Any) -> bool:
        """Return whether `value` is the `id` of an object in another part of the state."""
        ...

    def view(self, tensor: Tensor) -> View | None:
        """Return `tensor` as a view of a parameter's memory; None if it is not in any."""
        ...

    def is_view_without_address(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is in a parameter's memory, on a device without addresses."""
        ...

    @property
    def sharded_weight(self) -> "DTensor | None":
        """A parameter that is sharded over the ranks; None if there is none."""
        ...

    def weight_at(self, rows: Tensor) -> str | None:
        """Return the name of the parameter whose rows on this rank are `rows`, in the same memory."""
        ...


def instance_of(value: object, form: str, /, **state: Any) -> Instance:
    """Return an instance of the class of `value`."""
    return Instance(form, kind_name(type(value)), state)


def opaque_node(walk: Walk, value: Any, path: str) -> Any:
    """Return a node that holds only the class of a value, which no file can hold."""
    walk.meet(value, path)
    kind = kind_name(type(value))
    if issubclass(type(value), CONSTANT) and not _is_own_module(value):  # a weak proxy says another's class, or fails
        kind = kind_text(getattr(value, "__module__", "?"), getattr(value, "__qualname__", kind))
        walk.constants[path] = kind
    elif kind == _TRAINER:
        walk.constants[path] = kind
    # Of what can be closed, such as a database, attributes do not show what it holds.
    elif callable(value) and not (isinstance(value, weakref.ref) or hasattr(type(value), "close")):
        return compared_node(walk, value, path)
    else:
        walk.opaque[path] = value
    return Instance("opaque", kind)


def compared_node(walk: Walk, value: Any, path: str) -> Any:
    """Return a node that holds only the class of a value of a library; a change of the value is reported."""
    walk.meet(value, path)
    kind = kind_name(type(value))
    walk.constants[path] = kind
    if not kind.startswith(_COMPILED):
        walk.compared[path] = value
    return Instance("opaque", kind)


def _is_own_module(value: object) -> bool:
    """Return whether `value` is a Python module that code created without an import, which may hold anything."""
    return isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is not value


def pipeline_node(walk: Walk, value: Any, path: str) -> Any:
    """Describe a pipeline of torchdata by its class only: asked for its state, it begins to read."""
    if not walk.is_small:
        return opaque_node(walk, value, path)
    walk.meet(value, path)  # in data, of which copies are read: the loader keeps their position
    return instance_of(value, "opaque")


def bytes_node(walk: Walk, value: bytearray, path: str) -> Any:
    """Describe a bytearray."""
    walk.meet(value, path)
    return bytearray(value)


def item_nodes(walk: Walk, values: Any, path: str) -> Iterator[Any]:
    """Yield the nodes of the items of a sequence."""
    if PLAIN.issuperset(map(type, values)) and not (values and walk.is_address(next(iter(values)))):
        yield from values
    else:
        yield from (walk.node(value, f"{path}/{index}") for index, value in enumerate(values))


def list_node(walk: Walk, value: list[Any], path: str) -> Any:
    """Describe a list."""
    walk.meet(value, path)
    return list(item_nodes(walk, value, path))


def tuple_node(walk: Walk, value: tuple[Any, ...], path: str) -> Any:
    """Describe a tuple."""
    return tuple(item_nodes(walk, value, path))


def deque_node(walk: Walk, value: deque[Any], path: str) -> Any:
    """Describe a deque."""
    walk.meet(value, path)
    return deque(item_nodes(walk, value, path), value.maxlen)


def dict_node(walk: Walk, value: dict[Any, Any], path: str) -> Any:
    """Describe a dict; one whose keys are objects is `keyed`."""
    walk.meet(value, path)
    empty: Any = type(value)()
    factory = {}
    if isinstance(value, defaultdict) and any(value.default_factory is known for known in FACTORIES.values()):
        empty = defaultdict(value.default_factory)
    elif isinstance(value, defaultdict):
        factory = {"factory": _factory_node(walk, value.default_factory, path)}
    keys = [_key(walk, key, path, index) for index, key in enumerate(value)]
    if not all(map(is_plain_key, keys)):
        nodes = [walk.node(item, value_path(path, index)) for index, item in enumerate(value.values())]
        return instance_of(value, "keyed", empty=empty, keys=keys, values=nodes, **factory)
    items = {node: walk.node(item, step(path, key)) for node, (key, item) in zip(keys, value.items(), strict=True)}
    if factory:
        return instance_of(value, "dict", items=items, **factory)
    empty.update(items)
    return empty


def _factory_node(walk: Walk, factory: Any, path: str) -> Any:
    """Describe the factory of a defaultdict: a class by its name."""
    if isinstance(factory, type):
        return Instance("class", kind_text(factory.__module__, factory.__qualname__))
    return walk.node(factory, step(path, "default_factory"))


def _key(walk: Walk, key: Any, path: str, index: int) -> Any:
    if type(key) in PLAIN and not walk.is_address(key):
        return key
    node = walk.node(key, where := key_path(path, index))
    if where in walk.opaque:  # named once, however many keys there come to be
        walk.opaque[f"{path} (a key)"] = walk.opaque.pop(where)
    return node


def set_node(walk: Walk, value: Any, path: str) -> Any:
    """Describe a set."""
    walk.meet(value, path)
    if all(type(item) in PLAIN or _is_plain_tuple(item) for item in value):
        items = list(item_nodes(walk, value, path))
        return instance_of(value, "set", items=items, **described_table(value, items))
    nodes = [walk.node(item, f"{path}/{index}") for index, item in enumerate(value)]
    if not all(map(is_writable_item, nodes)):
        return opaque_node(walk, value, path)
    kept = sorted((node for node in nodes if isinstance(node, Same)), key=lambda node: node.path)
    return instance_of(value, "members", items=kept + [node for node in nodes if not isinstance(node, Same)])


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in PLAIN or _is_plain_tuple(item) for item in value)
