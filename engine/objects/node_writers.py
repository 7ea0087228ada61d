"""How each kind of object is described: a writer for each class, which returns its node."""

import enum
import itertools
import logging
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.hooks import RemovableHandle

from midstride.engine.code_origin import is_user_class, is_user_file
from midstride.engine.objects.attributes import state_attributes
from midstride.engine.objects.generators import get_state
from midstride.engine.objects.hashed_items import is_plain_key, is_writable_item, key_path, value_path
from midstride.engine.objects.plain_values import PLAIN, VALUES, kind_name, step
from midstride.engine.state.arrays import describe_dtype
from midstride.engine.state.codec import encode
from midstride.engine.state.nodes import Instance, Same, View, kind_text
from midstride.engine.state.stateful import Stateful

__all__ = ["DATA", "has_memory", "writer_of"]

#: built by Python, and holding nothing but what their attributes say
_NAMESPACES = frozenset(
    {
        *("types:SimpleNamespace", "argparse:Namespace", "collections:UserDict", "collections:UserList"),
        *("lightning.fabric.utilities.data:AttributeDict", "lightning_fabric.utilities.data:AttributeDict"),
    }
)
_CONSTANT = (type, types.ModuleType, logging.Logger, weakref.ref, property, RemovableHandle)
#: immutable types of Python's that users derive from
_BASES = (int, float, complex, str, bytes, frozenset)
#: of libraries, and known not to change by themselves: data sets are watched
DATA = (Dataset, DataLoader, Sampler)


class Walk(Protocol):
    """What a writer needs of the walk that it writes for."""

    anchors: Mapping[int, str]
    opaque: dict[str, object]
    constants: dict[str, str]

    def node(self, value: Any, path: str) -> Any:
        """Return the node of `value`, which stands at `path`."""
        ...

    def meet(self, value: object, path: str) -> None:
        """Note that `value` stands at `path`."""
        ...

    def attributes(self, values: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the nodes of attributes."""
        ...

    def is_address(self, value: Any) -> bool:
        """Return whether `value` is the `id` of what another part of the state keeps."""
        ...

    def view(self, tensor: Tensor) -> View | None:
        """Return how `tensor` lies in a parameter's memory, if it does."""
        ...


def has_memory(tensor: Tensor) -> bool:
    """Return whether `tensor` has strides in memory of its own or another's."""
    return tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and bool(tensor.numel())


def _of(value: object, form: str, /, **state: Any) -> Instance:
    """Return an instance of the class of `value`."""
    return Instance(form, kind_name(type(value)), state)


def _tensor(walk: Walk, value: Tensor, path: str) -> Any:
    walk.meet(value, path)
    if (view := walk.view(value)) is not None:
        return view
    plain = value.detach() if value.grad_fn is not None else value
    if plain.is_quantized or plain.is_nested or plain.is_meta or plain.layout not in (torch.strided, torch.sparse_coo):
        return _opaque(walk, value, path)
    node = Instance("on device", kind_name(type(value)), {"value": plain}) if plain.device.type != "cpu" else plain
    if value.is_leaf and value.grad is not None:
        return _of(value, "with gradient", value=node, gradient=walk.node(value.grad, step(path, "grad")))
    return node


def _array(walk: Walk, value: Any, path: str) -> Any:
    if describe_dtype(value.dtype) is None:
        return _opaque(walk, value, path)
    walk.meet(value, path)
    return value


def _scalar(walk: Walk, value: Any, path: str) -> Any:
    return value if describe_dtype(value.dtype) is not None else _opaque(walk, value, path)


def _items(walk: Walk, values: Any, path: str) -> Iterator[Any]:
    if PLAIN.issuperset(map(type, values)) and not (values and walk.is_address(next(iter(values)))):
        yield from values
    else:
        yield from (walk.node(value, f"{path}/{index}") for index, value in enumerate(values))


def _list(walk: Walk, value: list[Any], path: str) -> Any:
    walk.meet(value, path)
    return list(_items(walk, value, path))


def _tuple(walk: Walk, value: tuple[Any, ...], path: str) -> Any:
    return tuple(_items(walk, value, path))


def _deque(walk: Walk, value: deque[Any], path: str) -> Any:
    walk.meet(value, path)
    return deque(_items(walk, value, path), value.maxlen)


def _dict(walk: Walk, value: dict[Any, Any], path: str) -> Any:
    walk.meet(value, path)
    empty: Any = type(value)()
    if isinstance(value, defaultdict) and isinstance(value.default_factory, type):
        empty = defaultdict(value.default_factory)
    factory = {}
    if isinstance(value, defaultdict) and empty.default_factory is not value.default_factory:
        factory = {"factory": walk.node(value.default_factory, step(path, "default_factory"))}
    keys = [_key(walk, key, path, index) for index, key in enumerate(value)]
    if not all(map(is_plain_key, keys)):
        nodes = [walk.node(item, value_path(path, index)) for index, item in enumerate(value.values())]
        return _of(value, "keyed", empty=empty, keys=keys, values=nodes, **factory)
    items = {node: walk.node(item, step(path, key)) for node, (key, item) in zip(keys, value.items(), strict=True)}
    if factory:
        return _of(value, "dict", items=items, **factory)
    empty.update(items)
    return empty


def _key(walk: Walk, key: Any, path: str, index: int) -> Any:
    if type(key) in PLAIN and not walk.is_address(key):
        return key
    node = walk.node(key, where := key_path(path, index))
    if where in walk.opaque:  # named once, however many keys there come to be
        walk.opaque[f"{path} (a key)"] = walk.opaque.pop(where)
    return node


def _set(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    if all(type(item) in PLAIN or _is_plain_tuple(item) for item in value):
        return _of(value, "set", items=list(_items(walk, value, path)))
    nodes = [walk.node(item, f"{path}/{index}") for index, item in enumerate(value)]
    if not all(map(is_writable_item, nodes)):
        return _opaque(walk, value, path)
    kept = sorted((node for node in nodes if isinstance(node, Same)), key=lambda node: node.path)
    return _of(value, "members", items=kept + [node for node in nodes if not isinstance(node, Same)])


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in PLAIN or _is_plain_tuple(item) for item in value)


def _generator(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    node = _of(value, "generator", state=get_state(value))
    seeds: Any = getattr(getattr(value, "bit_generator", None), "seed_seq", None)
    if isinstance(seeds, np.random.SeedSequence):
        node.state["spawned"] = seeds.n_children_spawned
    if is_user_class(type(value)):
        node.state["attributes"] = walk.attributes(state_attributes(value), path)
    return node


def _function(walk: Walk, value: types.FunctionType, path: str) -> Any:
    walk.meet(value, path)
    kind = kind_text(value.__module__, value.__qualname__)
    walk.constants[path] = kind
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
    return Instance("function", kind, {**({"cells": cells} if cells else {}), **defaults})


def _is_constant(defaults: Any) -> bool:
    """Return whether nothing in the defaults of a function can be written, or no call of it can change them."""
    values = defaults.values() if isinstance(defaults, dict) else defaults or ()
    return all(type(value) in PLAIN or writer_of(type(value)) is _opaque for value in values)


def _method(walk: Walk, value: types.MethodType | types.BuiltinMethodType, path: str) -> Any:
    """Describe a method by its object; one of Python's own may be a function, whose object is its module."""
    function = getattr(value, "__func__", value)
    kind = kind_text(getattr(function, "__module__", "?"), function.__qualname__)
    walk.constants[path] = kind
    owner = value.__self__
    is_kept = id(owner) in walk.anchors or writer_of(type(owner)) is not _opaque
    if owner is None or isinstance(owner, type) or not is_kept:
        return Instance("opaque", kind)
    return Instance("method", kind, {"of": walk.node(owner, step(path, "__self__"))})


def _partial(walk: Walk, value: partial[Any], path: str) -> Any:
    walk.meet(value, path)
    held = {"func": value.func, "args": value.args, "keywords": value.keywords}
    return _of(value, "partial", **{n: walk.node(item, step(path, n)) for n, item in held.items()})


def _count(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    return _of(value, "count", items=list(value.__reduce__()[1]))


def _cursor(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    reduced = value.__reduce__()
    position = reduced[2] if len(reduced) > 2 else None  # None: read to its end
    return _of(value, "cursor", of=walk.node(reduced[1][0], step(path, "of")), place=position)


def _enum(walk: Walk, value: enum.Enum, path: str) -> Any:
    if value.name in type(value).__members__:
        return _of(value, "enum", name=value.name)
    return _of(value, "enum", value=value.value)  # several flags, or none


def _value(walk: Walk, value: Any, path: str) -> Any:
    return _of(value, "value", items=VALUES[kind_name(type(value))](value))


def _named_tuple(walk: Walk, value: Any, path: str) -> Any:
    return _of(value, "named tuple", items=list(_items(walk, value, path)))


def _object(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    node = _of(value, "object", attributes=walk.attributes(state_attributes(value), path))
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        node.state["items"] = _dict(walk, dict(base.items(value)), step(path, "items"))
    elif isinstance(value, deque):
        node.state["items"] = _deque(walk, deque(value, value.maxlen), step(path, "items"))
    elif isinstance(value, (list, set)):
        node.state["items"] = _list(walk, list(value), step(path, "items"))
    return node


def _derived(walk: Walk, value: Any, path: str) -> Any:
    """Describe a value of a user's class that is derived from an immutable one of Python's."""
    walk.meet(value, path)
    base: Any = next(kind for kind in _BASES if isinstance(value, kind))
    arguments = [value] if base is frozenset else base.__getnewargs__(value)
    plain = base(*arguments)
    attributes = walk.attributes(state_attributes(value), path)
    return _of(value, "derived", base=walk.node(plain, step(path, base.__name__)), attributes=attributes)


def _stateful(walk: Walk, value: Any, path: str) -> Any:
    """Describe an object of a library, such as a gradient scaler, by its own `state_dict`."""
    try:
        state = value.state_dict()
        encode(state)
    except Exception:  # it has none yet, or none that can be written
        return _opaque(walk, value, path)
    walk.meet(value, path)
    return _of(value, "stateful", state=state)


def _opaque(walk: Walk, value: Any, path: str) -> Any:
    walk.meet(value, path)
    kind = kind_name(type(value))
    if isinstance(value, _CONSTANT):
        kind = kind_text(getattr(value, "__module__", "?"), getattr(value, "__qualname__", kind))
        walk.constants[path] = kind
    elif callable(value):
        walk.constants[path] = kind
    else:
        walk.opaque[path] = value
    return Instance("opaque", kind)


Writer = Callable[[Walk, Any, str], Any]
#: how objects of each class are described; grows as classes are met
_WRITERS: dict[type, Writer] = {
    **{Tensor: _tensor, nn.Parameter: _tensor, nn.Buffer: _tensor, np.ndarray: _array},
    **{list: _list, tuple: _tuple, deque: _deque, set: _set, frozenset: _set, itertools.count: _count},
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), _dict),
    **dict.fromkeys((type(iter([])), type(iter(())), type(iter(range(0)))), _cursor),
    **{types.FunctionType: _function, types.MethodType: _method, types.BuiltinMethodType: _method},
    partial: _partial,
}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def writer_of(kind: type) -> Writer:
    """Return what describes objects of class `kind`."""
    return _WRITERS.get(kind) or _WRITERS.setdefault(kind, _writer(kind))


def _writer(kind: type) -> Writer:
    if issubclass(kind, _GENERATORS) and not issubclass(kind, random.SystemRandom):
        return _generator
    if issubclass(kind, np.generic):
        return _scalar
    if issubclass(kind, enum.Enum):
        return _enum
    if kind_name(kind) in VALUES:
        return _value
    if issubclass(kind, tuple):
        return _named_tuple if hasattr(kind, "_fields") and is_user_class(kind) else _opaque
    if issubclass(kind, (*_CONSTANT, Tensor, IterableDataset)):
        return _opaque
    if issubclass(kind, nn.Module) or not _is_library(kind):
        return _derived if issubclass(kind, _BASES) else _object
    is_ours = kind_name(kind).startswith("midstride.engine")  # kept elsewhere in the state
    return _stateful if issubclass(kind, Stateful) and not (is_ours or issubclass(kind, DATA)) else _opaque


def _is_library(kind: type) -> bool:
    """Return whether objects of `kind` are a library's: what their attributes mean is not known here."""
    if kind_name(kind) in _NAMESPACES or (kind.__module__.startswith("torch.optim") and kind.__module__ in sys.modules):
        return False
    return not is_user_class(kind)
