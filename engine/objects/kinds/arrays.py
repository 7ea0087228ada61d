"""Arrays: numpy's arrays and scalars, arrays of objects, numbers such as `array.array`."""

import array
import ctypes
import math
import multiprocessing.sharedctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.classes import class_called
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.state.arrays import describe_dtype
from midstride.engine.state.object_nodes import Instance, kind_name

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["Arrays", "Numbers", "Scalars"]


class Arrays(Kind):
    """Arrays of numpy; an array of objects is an instance with shape and items."""

    form = "array"
    types = node_types = (np.ndarray,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the array itself, or the nodes of its items."""
        if value.dtype == object:
            walk.meet(value, path)
            return self.instance(value, shape=list(value.shape), items=list(walk.items(value.ravel().tolist(), path)))
        if describe_dtype(value.dtype) is None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        return value

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill an array in place if it has the same dtype and shape."""
        if isinstance(node, Instance):
            return _restored_objects(restore, node, live, path)
        fits = isinstance(live, np.ndarray) and (live.dtype, live.shape) == (node.dtype, node.shape)
        if restore.use(live, path, fits=fits and live.flags.writeable):
            live[...] = node
            return live
        return restore.set(node, path)


def _restored_objects(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    shape = tuple(node.state["shape"])
    if math.prod(shape) != len(node.state["items"]):
        return restore.mark_stale(path, node.kind, live)
    is_array = isinstance(live, np.ndarray) and live.dtype == object
    before = live.ravel().tolist() if is_array else ()
    fits = is_array and live.shape == shape and live.flags.writeable
    target = live if restore.use(live, path, fits=fits) else restore.set(np.empty(shape, dtype=object), path)
    items = restore.items(node.state["items"], before, path)
    for index, item in zip(np.ndindex(shape), items, strict=True):
        target[index] = item
    return target


class Scalars(Kind):
    """numpy's scalars, which are immutable."""

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is a class of scalars."""
        return issubclass(kind, np.generic)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the scalar itself; a restore returns it, too."""
        return value if describe_dtype(value.dtype) is not None else OPAQUE.describe(walk, value, path)


#: base class of ctypes numbers
_SIMPLE: Any = ctypes.c_int.__base__
#: type codes of numbers; other codes may be addresses
_CODES = "bBhHiIlLqQfd?cuw"


class Numbers(Kind):
    """Numbers in memory: `array.array`, numbers and arrays of ctypes, also shared ones."""

    form = "numbers"

    def matches(self, kind: type) -> bool:
        """Return whether objects of `kind` may be numbers in memory."""
        return issubclass(kind, (array.array, ctypes.Array, _SIMPLE, multiprocessing.sharedctypes.SynchronizedBase))

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the bytes."""
        memory = _memory_of(value)
        if memory is None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        found = np.frombuffer(memory, dtype=np.uint8) if memory.nbytes else np.zeros(0, dtype=np.uint8)
        parts: dict[str, Any] = {}
        if is_user_class(type(value)):
            parts["attributes"] = walk.attributes(attributes_of(value), path)
        if isinstance(value, array.array):  # its length cannot change while another object shows its memory
            parts["code"] = value.typecode
            found = found.copy()
        return self.instance(value, **parts, bytes=found)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill the memory in place."""
        fits = live is not MISSING and kind_name(type(live)) == node.kind and self.matches(type(live))
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
            restore.attributes(node.state["attributes"], target, path)
        return target


def _memory_of(value: Any) -> memoryview | None:
    is_shared = isinstance(value, multiprocessing.sharedctypes.SynchronizedBase)
    memory = memoryview(value.get_obj() if is_shared else value)
    return memory if memory.format.strip("<>=@!") in _CODES else None
