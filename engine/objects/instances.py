"""Restores instances: one function for each form of node."""

import copy
import itertools
import random
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor

from midstride.engine.errors import NotExact
from midstride.engine.objects.attribute_restore import class_called, fill_attributes, fresh
from midstride.engine.objects.containers import (
    MISSING,
    Restore,
    fill_defaultdict,
    fill_dict,
    items_of,
    on_device,
    with_gradient,
)
from midstride.engine.objects.data_sets import TORCH_DATA
from midstride.engine.objects.distributed_tensors import fill_alias, fill_rows
from midstride.engine.objects.functions import fill_function, fill_method, fill_partial, fill_weak
from midstride.engine.objects.generator_search import Generator, get_state, set_state
from midstride.engine.objects.hashed_items import fill_keyed, keyed, members
from midstride.engine.objects.plain_values import kind_name, step
from midstride.engine.objects.python_objects import (
    fill_iterator,
    fill_numbers,
    fill_object_array,
    parts_of_iterator,
)
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.differences import differences
from midstride.engine.state.hash_table import fill_set, is_as_described
from midstride.engine.state.object_nodes import Instance, kind_text

__all__ = ["FORMS"]

_VALUES: dict[str, Callable[..., Any]] = {
    **{kind_name(kind): kind for kind in (range, slice, Decimal, Fraction, PosixPath, PurePosixPath, timedelta, date)},
    **{kind_name(UUID): UUID, kind_name(re.Pattern): re.compile, kind_name(type(...)): lambda: ...},
    kind_name(datetime): lambda text, fold: datetime.fromisoformat(text).replace(fold=fold),
}
_TORCH = (
    *(torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
    *(torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),
    *(torch.per_tensor_affine, torch.per_tensor_symmetric),
    *(torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams),
)
_VALUES.update(dict.fromkeys((kind_name(type(v)) for v in _TORCH), {str(v): v for v in _TORCH}.__getitem__))
_GENERATORS: dict[str, Callable[..., Any]] = {
    kind_name(kind): kind for kind in (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
}
#: numpy's bit generators by name
_BITS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}

_DATA = frozenset(map(kind_name, TORCH_DATA))


def _set(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    items = items_of(restore, node.state["items"], (), path)
    has_addresses = items != node.state["items"]  # which have no order that two attempts share
    table = node.state.get("table")
    fits = isinstance(live, (set, frozenset)) and kind_name(type(live)) == node.kind
    if fits and (is_as_described(live, items, table) or (has_addresses and live == set(items))):
        return live
    is_set = node.kind == "builtins:set"
    found: Any = live if is_set and restore.use(live, path, fits=type(live) is set) else set()
    is_same = fill_set(found, items, table)
    if not is_set:
        found = next((one for one in (frozenset(items), frozenset(found)) if list(one) == items), frozenset(found))
        is_same = list(found) == items
    if not is_same:
        restore.reordered.append(path)
    return restore.set(found, path)


def _generator(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    state = node.state["state"]
    fits = isinstance(live, Generator) and node.kind in ("", kind_name(type(live)))
    if not restore.use(live, path, fits=fits and _source_of(get_state(live)) == _source_of(state)):
        if node.kind not in _GENERATORS:
            return restore.mark_stale(path, node.kind, live)
        live = restore.set(_fresh_generator(node.kind, state, restore.device, path), path)
    set_state(live, state)
    if "spawned" in node.state:
        owner: Any = live  # one of numpy's
        bits = owner.bit_generator
        seeds = bits.seed_seq
        made = {"entropy": seeds.entropy, "spawn_key": seeds.spawn_key, "pool_size": seeds.pool_size}
        made |= node.state.get("seeds", {})  # which earlier versions did not keep
        bits.__setstate__((bits.state, np.random.SeedSequence(**made, n_children_spawned=node.state["spawned"])))
    if "attributes" in node.state:
        fill_attributes(restore, node.state["attributes"], live, path)
    return live


def _source_of(state: Any) -> Any:
    """Return the source of a generator with that state: the name of numpy's bit generator, or the size of the state."""
    if isinstance(state, Tensor):
        return state.numel()
    return state["bit_generator"] if isinstance(state, dict) else None


def _fresh_generator(kind: str, state: Any, device: torch.device, path: str) -> Any:
    """Return a new generator of that kind, with the bit generator or the device that `state` fits.

    Raises:
        NotExact: the state is that of a GPU's generator, and this rank has no GPU.
    """
    source = _source_of(state)
    if isinstance(state, Tensor) and source != _source_of(torch.default_generator.get_state()):
        if device.type == "cpu":
            raise NotExact(
                f"{path} draws from a generator of a GPU in the snapshot, and this rank trains on the CPU: what it "
                "draws could not go on. Resume on a GPU, or begin another run with the weights of this one."
            )
        return torch.Generator(device)
    return _GENERATORS[kind](*([_BITS[source]()] if isinstance(source, str) else []))


def _count(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    items = items_of(restore, node.state["items"], (), step(path, "items"))
    if type(live) is itertools.count and parts_of_iterator(live) == (tuple(items),):
        return restore.set(live, path)
    return restore.set(itertools.count(*items), path)


def _cursor(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    fits = live is not MISSING and kind_name(type(live)) == node.kind
    under = live.__reduce__()[1][0] if fits else MISSING
    source = restore.put(node.state["of"], under, step(path, "of"))
    if source is MISSING:
        return restore.mark_stale(path, node.kind, live)
    if not (fits and source is under and restore.use(live, path, fits=True)):
        live = restore.set(iter(source), path)
    position = node.state["place"]
    live.__setstate__(len(source) if position is None else position)
    if position is None:  # read to its end, however long that was
        next(live, None)
    return live


def _enum(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    kind = class_called(node.kind, live, Enum)
    if kind is not None and "value" in node.state:
        return kind(node.state["value"])
    if kind is None or node.state["name"] not in kind.__members__:
        return restore.mark_stale(path, f"{node.kind}.{node.state['name']}", live)
    return kind[node.state["name"]]


def _named_tuple(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    kind = class_called(node.kind, live, tuple)
    if kind is None:
        return restore.mark_stale(path, node.kind, live)
    items = items_of(restore, node.state["items"], live if type(live) is kind else (), path)
    if len(items) != len(kind._fields):
        return restore.mark_stale(path, f"{node.kind} of {len(items)} fields", live)
    return tuple.__new__(kind, items)


def _derived(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    kind = class_called(node.kind, live, object)
    plain = restore.put(node.state["base"], MISSING, step(path, "base"))
    base: Any = type(plain)
    if kind is None or not issubclass(kind, base):
        return restore.mark_stale(path, node.kind, live)
    made = restore.set(base.__new__(kind, plain), path)
    fill_attributes(restore, node.state["attributes"], made, path)
    return made


def _value(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    if node.kind not in _VALUES:
        return restore.mark_stale(path, node.kind, live)
    return _VALUES[node.kind](*node.state["items"])


def _object(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    if not restore.use(live, path, fits=live is not MISSING and kind_name(type(live)) == node.kind):
        live = restore.set(fresh(class_called(node.kind, live, object)), path)
        if live is None:
            return restore.mark_stale(path, node.kind, MISSING)
    fill_attributes(restore, node.state["attributes"], live, path)
    if "items" in node.state:
        _fill_base(restore, node.state["items"], live, step(path, "items"))
    return live


def _fill_base(restore: Restore, node: Any, live: Any, path: str) -> None:
    """Restore the items of an object whose class is derived from a container."""
    if isinstance(live, dict):
        before = dict(live)
        after: dict[Any, Any] = {}
        if isinstance(live, defaultdict):
            _fill_factory(restore, node, live, path)
        if isinstance(node, Instance) and node.form == "keyed":
            fill_keyed(restore, node, after, list(before.items()), path)
        else:
            fill_dict(restore, node.state["items"] if isinstance(node, Instance) else node, after, before, path)
        kind: Any = OrderedDict if isinstance(live, OrderedDict) else dict
        kind.clear(live)
        for key, value in after.items():
            kind.__setitem__(live, key, value)
    elif isinstance(live, set):
        fill_set(live, items_of(restore, node, (), path))
    elif isinstance(live, list):
        list.__setitem__(live, slice(None), items_of(restore, node, list(live), path))
    elif isinstance(live, deque):
        items = items_of(restore, node, list(live), path)
        maxlen = node.maxlen if isinstance(node, deque) else live.maxlen  # a list: as earlier versions wrote it
        deque.__init__(live, items, maxlen)


def _fill_factory(restore: Restore, node: Any, live: defaultdict[Any, Any], path: str) -> None:
    """Restore `default_factory` of an object whose class is derived from defaultdict."""
    if isinstance(node, Instance) and "factory" in node.state:
        factory, before = node.state["factory"], live.default_factory
        after = restore.put(factory, before, step(path, "default_factory"))
        live.default_factory = before if after is MISSING else after
    elif isinstance(plain := node.state["empty"] if isinstance(node, Instance) else node, defaultdict):
        live.default_factory = plain.default_factory  # of an earlier version: a dict


def _stateful(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    if live is MISSING or kind_name(type(live)) != node.kind or not restore.use(live, path, fits=True):
        return restore.mark_stale(path, node.kind, live)
    if differences(live.state_dict(), node.state["state"]):
        live.load_state_dict(copy.deepcopy(node.state["state"]))
    return live


def _address(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    found = restore.find(node.state["of"].path)
    return restore.mark_stale(path, node.state["of"].path, live) if found is MISSING else id(found)


def _opaque(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    found = None if live is MISSING else GraphWalk({}, {}).node(live, path)
    is_new = isinstance(found, Instance) and found.kind in _DATA  # of which earlier versions said no more
    form = found.form if isinstance(found, Instance) and is_new else node.form
    is_one = isinstance(found, Instance) and (found.form, found.kind) == (form, node.kind)
    if not is_one or restore.is_anchor(live):
        return restore.mark_stale(path, node.kind, live)
    if is_new:
        restore.read_back()
    return restore.set(live, path)


def _class(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    if isinstance(live, type) and kind_text(live.__module__, live.__qualname__) == node.kind:
        return live
    found = class_called(node.kind, MISSING, object)
    return restore.mark_stale(path, node.kind, live) if found is None else found


def _large(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    return restore.set(live, path) if restore.is_left_out(live) else restore.mark_stale(path, node.kind, live)


FORMS: dict[str, Callable[[Restore, Instance, Any, str], Any]] = {
    **{"object": _object, "generator": _generator, "set": _set, "function": fill_function, "method": fill_method},
    **{
        "partial": fill_partial,
        "weak": fill_weak,
        "derived": _derived,
        "count": _count,
        "iterator": fill_iterator,
        "numbers": fill_numbers,
        "array of objects": fill_object_array,
        "cursor": _cursor,
        "enum": _enum,
        "named tuple": _named_tuple,
    },
    **{
        "value": _value,
        "on device": on_device,
        "with gradient": with_gradient,
        "opaque": _opaque,
        "class": _class,
        "dict": fill_defaultdict,
        "keyed": keyed,
        "members": members,
        "large": _large,
    },
    **{"stateful": _stateful, "address": _address, "rows": fill_rows, "alias": fill_alias},
}
