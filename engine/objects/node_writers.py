"""Writers that describe instances, functions and generators: one for each kind of object, which returns its node."""

import enum
import itertools
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from midstride.engine.code_origin import is_user_class, is_user_file
from midstride.engine.objects.attribute_restore import KNOWN, NAMESPACES, is_made_anew
from midstride.engine.objects.attributes import attributes_of, made_by, state_attributes
from midstride.engine.objects.container_writers import (
    CONSTANT,
    Walk,
    bytes_node,
    compared_node,
    deque_node,
    dict_node,
    instance_of,
    item_nodes,
    list_node,
    opaque_node,
    pipeline_node,
    set_node,
    tuple_node,
)
from midstride.engine.objects.data_sets import TORCH_DATA
from midstride.engine.objects.distributed_tensors import distributed_node
from midstride.engine.objects.function_code import code_digest
from midstride.engine.objects.generator_search import Generator, get_state
from midstride.engine.objects.library_objects import is_comparable
from midstride.engine.objects.plain_values import (
    PLAIN,
    VALUES,
    is_plain_value,
    kind_name,
    step,
)
from midstride.engine.objects.python_objects import (
    ITERATORS,
    holds_numbers,
    iterator_node,
    numbers_node,
    object_array_node,
    parts_of_iterator,
)
from midstride.engine.state.arrays import describe_dtype
from midstride.engine.state.codec import encode
from midstride.engine.state.object_nodes import Instance, kind_text
from midstride.engine.state.row_shards import DISTRIBUTED
from midstride.engine.state.stateful import Stateful
from midstride.engine.state.tensors import other_kind

__all__ = ["DATA", "WATCHED", "has_memory", "is_described", "writer_of"]

#: classes of libraries whose attributes are all of their state
_NAMESPACES = NAMESPACES | {
    f"midstride.engine:Lightning{part}" for part in ("Logger", "Optimizer", "Strategy", "Trainer")
}
#: packages in which attributes are all of an object's state
_OF_TORCH = ("torch.optim", "torch.distributions")
#: immutable built-in types that users derive classes from
_BASES = (int, float, complex, str, bytes, frozenset)
#: classes of libraries whose objects do not change by themselves; data sets among them are watched
DATA = (Dataset, DataLoader, Sampler, np.memmap)
#: of these, classes whose changes are reported
WATCHED = (Dataset, np.memmap)


def has_memory(tensor: Tensor) -> bool:
    """Return whether `tensor` is strided and in memory with an address, which XLA tensors do not have."""
    if tensor.layout != torch.strided or tensor.device.type == "xla":
        return False
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and bool(tensor.numel())


def _tensor(walk: Walk, value: Tensor, path: str) -> Any:
    walk.meet(value, path)
    if (view := walk.view(value)) is not None:
        return view
    plain = value.detach() if value.grad_fn is not None else value
    if other_kind(plain) is not None or walk.is_view_without_address(value):
        return opaque_node(walk, value, path)
    node = Instance("on device", kind_name(type(value)), {"value": plain}) if plain.device.type != "cpu" else plain
    if value.is_leaf and value.grad is not None:
        return instance_of(value, "with gradient", value=node, gradient=walk.node(value.grad, step(path, "grad")))
    return node


def _array(walk: Walk, value: Any, path: str) -> Any:
    if value.dtype == object and type(value) is np.ndarray:
        return object_array_node(walk, value, path)
    if describe_dtype(value.dtype) is None:
        return opaque_node(walk, value, path)
    walk.meet(value, path)
    return value


def _scalar(walk: Walk, value: Any, path: str) -> Any:
    return value if describe_dtype(value.dtype) is not None else opaque_node(walk, value, path)


def _generator(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    node = instance_of(value, "generator", state=get_state(value))
    seeds: Any = getattr(getattr(value, "bit_generator", None), "seed_seq", None)
    if isinstance(seeds, np.random.SeedSequence):
        node.state["spawned"] = seeds.n_children_spawned
        node.state["seeds"] = {
            "entropy": seeds.entropy,
            "spawn_key": list(seeds.spawn_key),
            "pool_size": seeds.pool_size,
        }
    if is_user_class(type(value)):
        node.state["attributes"] = walk.attributes(state_attributes(value), path)
    return node


def _function(walk: Walk, value: types.FunctionType, path: str) -> Any:
    walk.meet(value, path)
    kind = kind_text(value.__module__, value.__qualname__)
    digest = code_digest(value)
    walk.constants[path] = kind if digest is None else f"{kind} {digest}"
    walk.functions.add(path)
    if not is_user_file(value.__code__.co_filename):
        return Instance("function", kind)
    cells = {
        name: walk.node(cell.cell_contents, step(path, name))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        if cell != types.CellType()  # bound
    }
    defaults = {
        name: walk.node(getattr(value, name), step(path, name))
        for name in ("__defaults__", "__kwdefaults__")
        if not _is_constant(getattr(value, name))
    }
    parts = {"cells": cells, "attributes": walk.attributes(vars(value), path)}
    code = {"code": digest} if digest is not None else {}
    return Instance("function", kind, {**code, **{name: nodes for name, nodes in parts.items() if nodes}, **defaults})


def _is_constant(defaults: Any) -> bool:
    """Return whether all defaults of a function are plain values or are not written to snapshots."""
    values = defaults.values() if isinstance(defaults, dict) else defaults or ()
    return all(type(value) in PLAIN or not is_described(type(value)) for value in values)


def _method(walk: Walk, value: types.MethodType | types.BuiltinMethodType, path: str) -> Any:
    """Describe a bound method by its object; a built-in function, or a method of an opaque object, as a constant."""
    function = getattr(value, "__func__", value)
    kind = kind_text(getattr(function, "__module__", "?"), function.__qualname__)
    owner = value.__self__
    is_kept = id(owner) in walk.anchors or is_described(type(owner))
    is_named = getattr(type(owner), function.__name__, None) is function or not hasattr(value, "__func__")
    if owner is None or isinstance(owner, type) or not (is_kept and is_named):
        walk.constants[path] = kind
        return Instance("opaque", kind)
    return Instance("method", kind, {"of": walk.node(owner, step(path, "__self__"))})


def _partial(walk: Walk, value: partial[Any], path: str) -> Any:
    walk.meet(value, path)
    parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
    node = instance_of(value, "partial", **{n: walk.node(item, step(path, n)) for n, item in parts.items()})
    if attributes := walk.attributes(attributes_of(value), path):
        node.state["attributes"] = attributes
    return node


def _weak(walk: Walk, value: Any, path: str) -> Any:
    """Describe a weak reference by the object it refers to, which other references keep alive."""
    if value.__callback__ is not None:
        return opaque_node(walk, value, path)
    walk.meet(value, path)
    target = value()
    return instance_of(value, "weak", **({} if target is None else {"of": walk.node(target, step(path, "of"))}))


def _count(walk: Walk, value: Any, path: str) -> Any:
    if (parts := parts_of_iterator(value)) is None:
        return opaque_node(walk, value, path)
    walk.meet(value, path)
    return instance_of(value, "count", items=list(item_nodes(walk, parts[0], step(path, "items"))))


def _cursor(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    reduced = value.__reduce__()
    position = reduced[2] if len(reduced) > 2 else None  # None: read to its end
    return instance_of(value, "cursor", of=walk.node(reduced[1][0], step(path, "of")), place=position)


def _enum(walk: Walk, value: enum.Enum, path: str) -> Any:
    if value.name in type(value).__members__:
        return instance_of(value, "enum", name=value.name)
    return instance_of(value, "enum", value=value.value)  # several flags, or none


def _value(walk: Walk, value: Any, path: str) -> Any:
    if not is_plain_value(value):
        return opaque_node(walk, value, path)
    return instance_of(value, "value", items=VALUES[kind_name(type(value))](value))


def _named_tuple(walk: Walk, value: Any, path: str) -> Any:
    return instance_of(value, "named tuple", items=list(item_nodes(walk, value, path)))


def _object(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    kind: type = type(value)
    if not is_made_anew(kind):
        walk.constants[path] = kind_name(kind)
    node = instance_of(value, "object", attributes=walk.attributes(state_attributes(value), path))
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        items = dict(base.items(value))
        own = defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else items
        node.state["items"] = dict_node(walk, own, step(path, "items"))
    elif isinstance(value, deque):
        node.state["items"] = deque_node(walk, deque(value, value.maxlen), step(path, "items"))
    elif isinstance(value, (list, set)):
        node.state["items"] = list_node(walk, list(value), step(path, "items"))
    return node


def _data_set(walk: Walk, value: Any, path: str) -> Any:
    """Describe a data set of torch; large values in it are left out."""
    with walk.without_large():
        return _object(walk, value, path)


def _derived(walk: Walk, value: Any, path: str) -> Any:
    """Describe an object of a user's class that is derived from an immutable built-in type."""
    walk.meet(value, path)
    base: Any = next(kind for kind in _BASES if isinstance(value, kind))
    arguments = [value] if base is frozenset else base.__getnewargs__(value)
    plain = base(*arguments)
    attributes = walk.attributes(state_attributes(value), path)
    return instance_of(value, "derived", base=walk.node(plain, step(path, base.__name__)), attributes=attributes)


def _stateful(walk: Walk, value: Any, path: str) -> Any:
    """Describe an object of a library, such as a gradient scaler, by its own `state_dict`."""
    try:
        state = value.state_dict()
        encode(state)
    except Exception:  # it has none yet, or none that can be written
        return opaque_node(walk, value, path)
    walk.meet(value, path)
    return instance_of(value, "stateful", state=state)


def _library_object(walk: Walk, value: Any, path: str) -> Any:
    """Describe an object of a library by its class; if its attributes are all that it holds, they are compared."""
    return (compared_node if is_comparable(value, walk.anchors) else opaque_node)(walk, value, path)


def _graph(walk: Walk, value: Any, path: str) -> Any:
    """Describe a torch.fx graph by its number of nodes only: each attempt traces it again."""
    walk.meet(value, path)
    walk.constants[path] = f"{kind_name(type(value))} {len(value.nodes)} nodes"
    return Instance("opaque", kind_name(type(value)))


Writer = Callable[[Walk, Any, str], Any]
#: class -> writer of its objects; classes that are met are added
_WRITERS: dict[type, Writer] = {
    **{Tensor: _tensor, nn.Parameter: _tensor, nn.Buffer: _tensor, np.ndarray: _array},
    **{
        list: list_node,
        tuple: tuple_node,
        deque: deque_node,
        set: set_node,
        frozenset: set_node,
    },
    **dict.fromkeys(ITERATORS, iterator_node) | {itertools.count: _count},
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), dict_node),
    **dict.fromkeys((type(iter([])), type(iter(())), type(iter(range(0)))), _cursor),
    **{types.FunctionType: _function, types.MethodType: _method, types.BuiltinMethodType: _method},
    **{partial: _partial, weakref.ref: _weak, bytearray: bytes_node},
    **dict.fromkeys(TORCH_DATA, _data_set),
}
#: of those whose module takes seconds to load, by name
_NOT_LOADED: dict[str, Writer] = {DISTRIBUTED: distributed_node, "torch.fx.graph:Graph": _graph}


def writer_of(kind: type) -> Writer:
    """Return the writer for objects of class `kind`."""
    return _WRITERS.get(kind) or _WRITERS.setdefault(kind, _NOT_LOADED.get(kind_name(kind)) or _writer(kind))


def is_described(kind: type) -> bool:
    """Return whether objects of `kind` are described by more than their class."""
    return writer_of(kind) not in (opaque_node, _library_object)


def _writer(kind: type) -> Writer:
    if issubclass(kind, Generator) and not issubclass(kind, random.SystemRandom):
        return _generator
    if issubclass(kind, (np.generic, enum.Enum)):
        return _scalar if issubclass(kind, np.generic) else _enum
    if kind_name(kind) in VALUES or holds_numbers(kind):
        return _value if kind_name(kind) in VALUES else numbers_node
    if issubclass(kind, tuple):
        return _named_tuple if hasattr(kind, "_fields") else opaque_node
    if issubclass(kind, (*CONSTANT, Tensor, IterableDataset)):
        return opaque_node
    if issubclass(kind, partial) and not _is_library(kind):
        return _partial
    if issubclass(kind, nn.Module) or not _is_library(kind):
        return _derived if issubclass(kind, _BASES) else _object_writer(kind)
    return _library_writer(kind)


def _object_writer(kind: type) -> Writer:
    """Return the writer of attributes and items, if these are all of the state of `kind`; else the opaque writer."""
    return _object if made_by(kind) in KNOWN else opaque_node


def _library_writer(kind: type) -> Writer:
    is_ours = kind_name(kind).startswith("midstride.engine")  # kept elsewhere in the state
    if is_ours or issubclass(kind, DATA):
        return opaque_node
    if kind.__module__.startswith("torchdata.nodes"):
        return pipeline_node
    return _stateful if issubclass(kind, Stateful) else _library_object


def _is_library(kind: type) -> bool:
    """Return whether `kind` is a class of a library, whose attributes may not be all of its state."""
    if kind_name(kind) in _NAMESPACES or (kind.__module__.startswith(_OF_TORCH) and kind.__module__ in sys.modules):
        return False
    return not is_user_class(kind)
