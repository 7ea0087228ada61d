"""What a sampler carries from one epoch to the next: its counters, its generators, or what it says itself.

Values are filled in place: who shares a tensor, a list or a generator with the sampler (a training step that writes
its weights) goes on sharing it after a resume.
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

from midstride.engine.data.in_place_copy import copy_into
from midstride.engine.errors import NotExact, UnsupportedState
from midstride.engine.objects.attributes import attributes_of, members_of, set_attribute
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.generators import Generator, find_generators, get_state, set_state
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.graph_restore import GraphRestore
from midstride.engine.state.codec import walk
from midstride.engine.state.differences import differences, same_key_order

__all__ = ["SamplerState", "samplers_in", "values_beside"]

_LONG = 10_000
_GENERATORS = "generators/"
#: of a list that is a sampler itself
_ITEMS = "items"
#: what a sampler may hold and is not part of it
_OTHERS = (nn.Module, Dataset, DataLoader, Generator)
_CONTAINERS = (list, tuple, deque, dict)
_SCALARS = frozenset({type(None), bool, int, float, str})
#: what users derive values from
_VALUES = (Enum, int, float, complex, str, bytes, *_CONTAINERS, set, frozenset)
#: what the data set is called in nodes
_DATA = "data set"
State = dict[str, Any]
Nodes = dict[str, dict[str, Any]]


class SamplerState:
    """The state of a sampler, and of the objects it holds, as it differs from when it was built.

    A sampler is built anew in every attempt, so what never changes (weights, indices) is in no snapshot.

    Args:
        sampler: any sampler or batch sampler.
        dataset: what it samples from; not part of its state.
    """

    def __init__(self, sampler: Any, dataset: object) -> None:
        self._sampler, self._dataset = sampler, dataset
        self._built = self.full()
        self._packed: dict[str, bytes] = {}  # what is known to be as it was built

    def of_copy(self, sampler: Any) -> "SamplerState":
        """Return the state of `sampler`, a copy of this one's, which is put where this one was built."""
        state = SamplerState(sampler, self._dataset)
        state._built = self._built
        state.restore({})
        return state

    def changes(self) -> State:
        """Return what differs from when the sampler was built, copied."""
        return {path: _copied(value) for path, value in self._live().items() if not self._is_as_built(path, value)}

    def _is_as_built(self, path: str, value: Any) -> bool:
        """Return whether `value` is what stood at `path` when the sampler was built; asked at every snapshot."""
        if path not in self._built:
            return False
        packed = _packed(value)
        if packed is not None and packed == self._packed.get(path):
            return True
        if _differ(self._built[path], value):
            return False
        if packed is not None:
            self._packed[path] = packed
        return True

    def restore(self, state: State) -> None:
        """Put the sampler where it was when `changes` returned `state`.

        Raises:
            NotExact: a part of it is not there.
        """
        self.restore_full({**self._built, **state})

    def full(self) -> State:
        """Return all of it, copied."""
        return {path: _copied(value) for path, value in self._live().items()}

    def beside(self) -> Nodes:
        """Return what the object graph writes of it, by the path of its owner."""
        found = list(values_beside(self._sampler, self._dataset))
        names = {id(self._dataset): _DATA, **{id(owner): path for path, owner, _ in found}}
        walk = GraphWalk(names, {})
        return copy.deepcopy({path: walk.root_attributes(own, path, is_small=True) for path, _, own in found})

    def restore_beside(self, nodes: Nodes) -> None:
        """Put back what `beside` returned of another sampler of the kind."""
        owners = {path: owner for path, owner, _ in values_beside(self._sampler, self._dataset)}
        filling = GraphRestore(GraphWalk({}, {}), {_DATA: self._dataset, **owners}, torch.device("cpu"))
        for path in (path for path in nodes if path in owners):
            own = attributes_of(owners[path])
            for name, node in nodes[path].items():
                if (value := filling.put(node, own.get(name, MISSING), f"{path}/{name}")) is not MISSING:
                    set_attribute(owners[path], name, value)

    def _live(self) -> State:
        """Return all of it, as it is."""
        state: State = (
            {_ITEMS: self._sampler} if type(self._sampler) in _CONTAINERS and _is_plain(self._sampler) else {}
        )
        for path, owner in _owners(self._sampler, self._dataset).items():
            if _has_state_dict(owner):
                state[f"{path}/"] = owner.state_dict()
                continue
            own = attributes_of(owner).items()
            state |= {f"{path}/{name}": value for name, value in own if _is_plain(value)}
        generators = find_generators(self._sampler, beside=self._dataset)
        return state | {_GENERATORS + name: get_state(g) for name, g in generators.items()}

    def restore_full(self, wanted: State) -> None:
        """Put the sampler where it was when `full` returned `wanted`."""
        owners, now = _owners(self._sampler, self._dataset), self.full()
        generators = find_generators(self._sampler, beside=self._dataset)
        for path in now.keys() - wanted.keys():
            owner, _, name = path.rpartition("/")
            if owner in owners:
                delattr(owners[owner], name)
        for path, value in wanted.items():
            owner, _, name = path.rpartition("/")
            if path == _ITEMS:
                copy_into(self._sampler, value)
            elif path.startswith(_GENERATORS):
                set_state(_existing(generators, path.removeprefix(_GENERATORS)), value)
            elif name == "":
                _existing(owners, owner).load_state_dict(copy.deepcopy(value))
            elif path not in now or _differ(now[path], value):
                there = _existing(owners, owner)
                setattr(there, name, copy_into(getattr(there, name, None), value))


def values_beside(sampler: Any, dataset: object) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the path of each object that `sampler` is made of, the object, and those attributes that are in no state.

    They are of kinds that only the object graph can write, such as a `Fraction` or a class derived from dict.
    """
    for path, owner in _owners(sampler, dataset).items():
        if not _has_state_dict(owner):
            own = {name: v for name, v in attributes_of(owner).items() if v is not dataset and _is_beside(v)}
            yield path.removeprefix("sampler").strip("."), owner, own


def _owners(sampler: Any, dataset: object) -> dict[str, Any]:
    """Return `sampler` and the objects it is made of, by path."""
    owners: dict[str, Any] = {}
    seen, queue = {id(dataset)}, deque([("sampler", sampler)])
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, (*_OTHERS, type)) or value is None:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS and len(value) <= _LONG and not _is_plain(value):
            queue += [(path + step, item) for step, item in members_of(value)]
        elif _has_state_dict(value) or _is_object(value):
            owners[path] = value
            queue += [] if _has_state_dict(value) else [(path + step, item) for step, item in members_of(value)]
    return owners


def _is_beside(value: Any) -> bool:
    """Return whether `value`, or something in it, is neither plain nor an object that has a state of its own."""
    if isinstance(value, random.Random):
        return type(value) not in (random.Random, random.SystemRandom)
    if isinstance(value, _OTHERS) or _has_state_dict(value) or _is_object(value) or _is_plain(value):
        return False
    if type(value) is dict and not all(map(_is_plain, value)):  # keys that only the graph can write
        return True
    return type(value) not in _CONTAINERS or any(_is_beside(item) for _, item in members_of(value))


def _existing(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise NotExact(f"there is no {name} yet when it is built")
    return found[name]


def samplers_in(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and those it wraps."""
    seen = set[int]()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        inner = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
        sampler = next((value for value in inner if hasattr(value, "__iter__") and hasattr(value, "__dict__")), None)


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_object(value: Any) -> bool:
    """Return whether `value` is of a user's class, or a sampler: of other libraries' objects nothing is known.

    What a user derives from a value, such as an int, a dict or an Enum, is a value.
    """
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if isinstance(value, Sampler) or library in sys.stdlib_module_names or library in ("torch", "numpy"):
        return isinstance(value, Sampler)
    is_frozen = is_dataclass(kind) and vars(kind)["__dataclass_params__"].frozen
    return not (is_frozen or isinstance(value, _VALUES))


def _is_plain(value: Any, deep: int = 8) -> bool:
    """Return whether `value` is of a kind that a snapshot holds; of long lists the first items speak for all."""
    kind = type(value)
    if kind in _SCALARS or kind is np.ndarray:
        return True
    if isinstance(value, Tensor):
        return _is_plain_tensor(value)
    items = value[:_LONG] if isinstance(value, (list, tuple)) else value
    if kind in (list, tuple) and deep:  # many numbers, in lists of them: to write them would take seconds
        others = {*map(type, items)} - _SCALARS
        if others <= {list, tuple}:
            return all(_is_plain(item, deep - 1) for item in items if type(item) in others)
    try:
        walk(items)
    except UnsupportedState:
        return False
    return True


class _Pickler(pickle.Pickler):
    """Refuses tensors, for which pickle would take longer than a comparison."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError("a tensor")
        return NotImplemented


def _packed(value: Any) -> bytes | None:
    """Return bytes that only what is alike in every bit has too; None where a comparison takes less time."""
    if isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and len(value) > _LONG):
        return None
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # of a state_dict of the user's, which may hold anything
        return None
    return buffer.getvalue()


def _is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether `tensor` is no more than its values, each in a place of its own: there can be no gradient."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.requires_grad:
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and len(a) > _LONG:
        return bool(a != b)  # a thousand times as fast
    return bool(differences(a, b)) or not same_key_order(a, b)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)) and len(value) > _LONG:
        return copy.copy(value)
    return copy.deepcopy(value)
