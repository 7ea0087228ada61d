"""Describes and restores iterators, arrays and shared values of the standard library."""

import array
import ctypes
import itertools
import math
import multiprocessing.sharedctypes
import operator
import warnings
from collections import deque
from typing import Any

import numpy as np

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attribute_restore import class_called, fill_attributes
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.container_writers import Walk, instance_of, item_nodes, opaque_node
from midstride.engine.objects.containers import MISSING, Restore, items_of
from midstride.engine.objects.plain_values import kind_name, step
from midstride.engine.state.object_nodes import Instance

__all__ = [
    "ITERATORS",
    "fill_iterator",
    "fill_numbers",
    "fill_object_array",
    "holds_numbers",
    "iterator_node",
    "numbers_node",
    "object_array_node",
    "parts_of_iterator",
]

#: iterators over other iterators
ITERATORS = (
    *(enumerate, filter, map, reversed, zip, itertools.accumulate, itertools.chain, itertools.compress),
    *(itertools.count, itertools.cycle, itertools.dropwhile, itertools.filterfalse, itertools.islice),
    *(itertools.pairwise, itertools.repeat, itertools.starmap, itertools.takewhile, itertools.zip_longest),
)
_ITERATOR_KINDS: dict[str, Any] = {kind_name(kind): kind for kind in ITERATORS}
#: base class of ctypes numbers
_SIMPLE: Any = ctypes.c_int.__base__
#: type codes of numbers; other codes may be addresses
_CODES = "bBhHiIlLqQfd?cuw"


def parts_of_iterator(iterator: Any) -> tuple[Any, ...] | None:
    """Return what `__reduce__` of an iterator returns for a copy of it; None if it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            reduced = iterator.__reduce__()
        except TypeError:  # from Python 3.14 on those of itertools have none
            return None
    made_of = reduced[1]
    if isinstance(iterator, itertools.zip_longest):  # which says () of one that it has read to its end
        made_of = (*(iter(()) if part == () else part for part in made_of),)
    return (made_of, *[state for state in reduced[2:3] if state is not None])


def iterator_node(walk: Walk, value: Any, path: str) -> Any:
    """Describe an iterator by the arguments of a copy."""
    parts = parts_of_iterator(value)
    if parts is None:
        return opaque_node(walk, value, path)
    walk.meet(value, path)
    return instance_of(value, "iterator", parts=list(item_nodes(walk, parts, step(path, "parts"))))


def fill_iterator(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore an iterator, by a new one."""
    kind, within = _ITERATOR_KINDS.get(node.kind), step(path, "parts")
    before = parts_of_iterator(live) if kind is not None and type(live) is kind else None
    parts = items_of(restore, node.state["parts"], before or (), within)
    is_whole = not any(where.startswith(f"{within}/") for where in restore.stale)
    if kind is None or not is_whole:
        return restore.mark_stale(path, node.kind, live)
    made = kind.__new__(kind, *parts[0])
    for state in parts[1:]:
        made.__setstate__(state)
    if isinstance(made, itertools.cycle) and parts[1][1]:  # past its first round: a new one counts otherwise
        made = _cycle_in_a_later_round(parts[1][0], left=operator.length_hint(parts[0][0]))
    return restore.set(made, path)


def _cycle_in_a_later_round(items: list[Any], left: int) -> "itertools.cycle[Any]":
    """Return an `itertools.cycle` past its first round over `items`, with `left` items of this round to come."""
    made = itertools.cycle(items)
    deque(itertools.islice(made, 3 * len(items) - left), maxlen=0)
    return made


def holds_numbers(kind: type) -> bool:
    """Return whether objects of `kind` may be numbers in memory: `array.array`, ctypes, or shared between processes."""
    return issubclass(kind, (array.array, ctypes.Array, _SIMPLE, multiprocessing.sharedctypes.SynchronizedBase))


def numbers_node(walk: Walk, value: Any, path: str) -> Any:
    """Describe numbers in memory by their bytes."""
    memory = _memory_of(value)
    if memory is None:
        return opaque_node(walk, value, path)
    walk.meet(value, path)
    found = np.frombuffer(memory, dtype=np.uint8) if memory.nbytes else np.zeros(0, dtype=np.uint8)
    parts: dict[str, Any] = (
        {"attributes": walk.attributes(attributes_of(value), path)} if is_user_class(type(value)) else {}
    )
    if isinstance(value, array.array):  # whose length cannot change while another shows its memory
        parts |= {"code": value.typecode}
        found = found.copy()
    return instance_of(value, "numbers", **parts, bytes=found)


def _memory_of(value: Any) -> memoryview | None:
    is_shared = isinstance(value, multiprocessing.sharedctypes.SynchronizedBase)
    memory = memoryview(value.get_obj() if is_shared else value)
    return memory if memory.format.strip("<>=@!") in _CODES else None


def fill_numbers(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore numbers in memory, in place."""
    fits = live is not MISSING and kind_name(type(live)) == node.kind and holds_numbers(type(live))
    if (code := node.state.get("code")) is not None:
        fits = fits and live.typecode == code
        kind = class_called(node.kind, live, array.array) or array.array
        target = live if restore.use(live, path, fits=fits) else restore.set(kind(code), path)
        target[:] = array.array(code, node.state["bytes"].tobytes())
    else:
        target, memory = live, _memory_of(live) if fits else None
        if memory is None or memory.nbytes != node.state["bytes"].size or not restore.use(live, path, fits=True):
            return restore.mark_stale(path, node.kind, live)
        np.frombuffer(memory, dtype=np.uint8)[:] = node.state["bytes"]
    if "attributes" in node.state:
        fill_attributes(restore, node.state["attributes"], target, path)
    return target


def object_array_node(walk: Walk, value: Any, path: str) -> Any:
    """Describe an array of objects."""
    walk.meet(value, path)
    items = list(item_nodes(walk, value.ravel().tolist(), path))
    return instance_of(value, "array of objects", shape=list(value.shape), items=items)


def fill_object_array(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore an array of objects, in place if it has the same shape."""
    shape = tuple(node.state["shape"])
    if math.prod(shape) != len(node.state["items"]):
        return restore.mark_stale(path, node.kind, live)
    is_array = isinstance(live, np.ndarray) and live.dtype == object
    before = live.ravel().tolist() if is_array else ()
    fits = is_array and live.shape == shape and live.flags.writeable
    target = live if restore.use(live, path, fits=fits) else restore.set(np.empty(shape, dtype=object), path)
    items = items_of(restore, node.state["items"], before, path)
    for index, item in zip(np.ndindex(shape), items, strict=True):
        target[index] = item
    return target
