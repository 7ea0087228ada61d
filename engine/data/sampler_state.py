"""The state of a sampler between epochs: counters, generators, or its own `state_dict`.

Values are restored in place, so that other references to a tensor, a list or a generator of the sampler (such as in a
training step that writes its weights) stay valid after a resume.
"""

import copy
import io
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from midstride.engine.code_origin import module_of
from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import attributes_of, members_of, set_attribute
from midstride.engine.objects.generator_search import find_generators
from midstride.engine.objects.kinds.generators import Generator, get_state, set_state
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.codec import is_writable
from midstride.engine.state.differences import differences, same_key_order

__all__ = ["SamplerState", "graph_attributes", "samplers_in"]

#: length above which lists are compared and copied without their items' details
_LONG = 10_000
_GENERATORS = "generators/"
#: path of the items of a list that is a sampler itself
_ITEMS = "items"
#: types of attributes that are not part of a sampler's state
_NOT_STATE = (nn.Module, Dataset, DataLoader, Generator)
_CONTAINERS = (list, tuple, deque, dict)
_SCALARS = frozenset({type(None), bool, int, float, str})
#: base classes of values
_VALUE_TYPES = (Enum, int, float, complex, str, bytes, *_CONTAINERS, set, frozenset)
#: name of the data set in nodes
_DATA = "data set"
State = dict[str, Any]
Nodes = dict[str, dict[str, Any]]


class SamplerState:
    """Changed state of a sampler and of its objects since it was built.

    A sampler is built in every attempt, so snapshots do not hold values that never change, such as weights and indices.

    Args:
        sampler: any sampler or batch sampler.
        dataset: its data set, which is not part of its state.
    """

    def __init__(self, sampler: Any, dataset: object) -> None:
        self._sampler, self._dataset = sampler, dataset
        self._built = self.full()
        self._pickles: dict[str, bytes] = {}  # path -> pickle of a value that is known to equal the one at construction

    def for_copy(self, sampler: Any) -> "SamplerState":
        """Return the state of `sampler`, a copy, after setting it to the state at construction."""
        state = SamplerState(sampler, self._dataset)
        state._built = self._built
        state.restore({})
        return state

    def changes(self) -> State:
        """Return copies of the values that have changed since the sampler was built."""
        return {path: _copy_of(value) for path, value in self._values().items() if not self._is_as_built(path, value)}

    def _is_as_built(self, path: str, value: Any) -> bool:
        """Return whether `value` is as built at `path`; called at every snapshot."""
        if path not in self._built:
            return False
        packed = _pickled(value)
        if packed is not None and packed == self._pickles.get(path):
            return True
        if _differ(self._built[path], value):
            return False
        if packed is not None:
            self._pickles[path] = packed
        return True

    def restore(self, state: State) -> None:
        """Restore the sampler from a result of `changes`.

        Raises:
            NotExact: an object or a generator of the state does not exist in the sampler.
        """
        self.restore_full({**self._built, **state})

    def full(self) -> State:
        """Return copies of all values."""
        return {path: _copy_of(value) for path, value in self._values().items()}

    def graph_state(self) -> Nodes:
        """Return path of an owner -> nodes of attributes that need the object graph."""
        found = list(graph_attributes(self._sampler, self._dataset))
        names = {id(self._dataset): _DATA, **{id(owner): path for path, owner, _ in found}}
        walk = GraphWalk(names, {})
        return copy.deepcopy({path: walk.root_attributes(own, path, is_small=True) for path, _, own in found})

    def restore_graph_state(self, nodes: Nodes) -> None:
        """Restore the result of `graph_state` of another sampler of the same class."""
        owners = {path: owner for path, owner, _ in graph_attributes(self._sampler, self._dataset)}
        restore = GraphRestore(GraphWalk({}, {}), {_DATA: self._dataset, **owners}, torch.device("cpu"))
        for path in (path for path in nodes if path in owners):
            own = attributes_of(owners[path])
            for name, node in nodes[path].items():
                if (value := restore.value(node, own.get(name, MISSING), f"{path}/{name}")) is not MISSING:
                    set_attribute(owners[path], name, value)

    def _values(self) -> State:
        """Return all values, not copied."""
        state: State = (
            {_ITEMS: self._sampler} if type(self._sampler) in _CONTAINERS and _is_plain(self._sampler) else {}
        )
        for path, owner in _owners(self._sampler, self._dataset).items():
            if _has_state_dict(owner):
                state |= _own_state(path, owner)
                continue
            own = attributes_of(owner).items()
            state |= {f"{path}/{name}": value for name, value in own if _is_plain(value)}
        generators = find_generators(self._sampler, beside=self._dataset)
        return state | {_GENERATORS + name: get_state(g) for name, g in generators.items()}

    def restore_full(self, wanted: State) -> None:
        """Restore the sampler from a result of `full`."""
        owners, now = _owners(self._sampler, self._dataset), self.full()
        generators = find_generators(self._sampler, beside=self._dataset)
        for path in now.keys() - wanted.keys():
            owner, _, name = path.rpartition("/")
            # None stays: it may have become an object, which is not part of this state.
            if owner in owners and name and now[path] is not None:
                delattr(owners[owner], name)
        for path, value in wanted.items():
            owner, _, name = path.rpartition("/")
            if path == _ITEMS:
                _fill(self._sampler, value, path)
            elif path.startswith(_GENERATORS):
                set_state(_find(generators, path.removeprefix(_GENERATORS)), value)
            elif name == "":
                _find(owners, owner).load_state_dict(copy.deepcopy(value))
            elif path not in now or _differ(now[path], value):
                there = _find(owners, owner)
                setattr(there, name, _fill(getattr(there, name, MISSING), value, path))


def graph_attributes(sampler: Any, dataset: object) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield path, object and attributes of objects that `SamplerState` leaves out.

    Only the object graph can describe these, such as a `Fraction` or an object of a class derived from dict.
    """
    for path, owner in _owners(sampler, dataset).items():
        if not _has_state_dict(owner):
            own = {name: v for name, v in attributes_of(owner).items() if v is not dataset and _needs_graph(v)}
            yield path.removeprefix("sampler").strip("."), owner, own


def _owners(sampler: Any, dataset: object) -> dict[str, Any]:
    """Return `sampler` and the objects in it, by path."""
    owners: dict[str, Any] = {}
    seen, queue = {id(dataset)}, deque([("sampler", sampler)])
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, (*_NOT_STATE, type)) or value is None:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS and len(value) <= _LONG and not _is_plain(value):
            queue += [(path + step, item) for step, item in members_of(value)]
        elif _has_state_dict(value) or _is_object(value):
            owners[path] = value
            queue += [] if _has_state_dict(value) else [(path + step, item) for step, item in members_of(value)]
    return owners


def _needs_graph(value: Any) -> bool:
    """Return whether `value`, or something in it, is neither plain nor an object in `_owners`."""
    if isinstance(value, random.Random):
        return type(value) not in (random.Random, random.SystemRandom)
    if isinstance(value, _NOT_STATE) or _has_state_dict(value) or _is_object(value) or _is_plain(value):
        return False
    if type(value) is dict and not all(map(_is_plain, value)):  # keys that only the graph can describe
        return True
    return type(value) not in _CONTAINERS or any(_needs_graph(item) for _, item in members_of(value))


def _find(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise NotExact(f"{name} does not exist when it is built: create it in __init__")
    return found[name]


def samplers_in(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and the samplers that it wraps."""
    seen = set[int]()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        inner = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
        sampler = next((value for value in inner if hasattr(value, "__iter__") and hasattr(value, "__dict__")), None)


def _fill(live: Any, saved: Any, path: str) -> Any:
    """Return `live` made equal to `saved` in place, or else a copy of `saved`."""
    node = GraphWalk({}, {}).node(copy.deepcopy(saved), path)
    return GraphRestore(GraphWalk({}, {}), {}, torch.device("cpu")).value(node, live, path)


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _own_state(path: str, owner: Any) -> State:
    """Return the state that `owner` says; nothing if it has none before its first epoch."""
    try:
        return {f"{path}/": owner.state_dict()}
    except Exception:
        return {}


def _is_object(value: Any) -> bool:
    """Return whether `value` is a sampler, or an object of a user's class with attributes.

    Objects of classes derived from a value type, such as int, dict or Enum, are values.
    """
    kind = type(value)
    library = module_of(kind).partition(".")[0]
    if isinstance(value, Sampler) or library in sys.stdlib_module_names or library in ("torch", "numpy"):
        return isinstance(value, Sampler)
    is_frozen = is_dataclass(kind) and vars(kind)["__dataclass_params__"].frozen
    return not (is_frozen or isinstance(value, _VALUE_TYPES))


def _is_plain(value: Any, deep: int = 8) -> bool:
    """Return whether `value` can be written, by the first items of long lists."""
    kind = type(value)
    if kind in _SCALARS or kind is np.ndarray:
        return True
    if isinstance(value, Tensor):
        return _is_plain_tensor(value)
    items = value[:_LONG] if isinstance(value, (list, tuple)) else value
    if kind in (list, tuple) and deep:  # a shortcut for nested lists of numbers, whose encoding may take seconds
        others = {*map(type, items)} - _SCALARS
        if others <= {list, tuple}:
            return all(_is_plain(item, deep - 1) for item in items if type(item) in others)
    return is_writable(items)


class _Pickler(pickle.Pickler):
    """Refuses tensors, which are faster to compare than to pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError("a tensor")
        return NotImplemented


def _pickled(value: Any) -> bytes | None:
    """Return bytes that differ for values with other bits; None if comparing is faster."""
    if isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and len(value) > _LONG):
        return None
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # a user's state_dict may hold any object
        return None
    return buffer.getvalue()


def _is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether `tensor` is strided, without gradient and overlapping elements."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.requires_grad:
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and len(a) > _LONG:
        return bool(a != b)  # a thousand times faster
    return bool(differences(a, b)) or not same_key_order(a, b)


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)) and len(value) > _LONG:
        return copy.copy(value)
    return copy.deepcopy(value)
