"""Arrays: numpy's arrays and scalars, masked ones and those of objects, `array.array`."""

import array
import ctypes
import math
import multiprocessing.sharedctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.array_memory import address_of
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.classes import class_called
from midstride.engine.objects.kinds.kind import MISSING, Kind, is_alike
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.objects.kinds.tensors import in_memory_of
from midstride.engine.state.arrays import describe_dtype, dtype_of
from midstride.engine.state.differences import differences
from midstride.engine.state.object_nodes import Instance, kind_name, loaded, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["Arrays", "DataTypes", "DerivedArrays", "MaskedArrays", "MemoryMaps", "Numbers", "Records", "Scalars"]


class Arrays(Kind):
    """Arrays of numpy; an array of objects is an instance with shape and items."""

    form = "array"
    types = node_types = (np.ndarray,)

    def fills(self, value: Any) -> bool:
        """Return whether the array is writable."""
        return bool(value.flags.writeable)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the array itself, or the nodes of its items."""
        if value.dtype == object:
            walk.meet(value, path)
            return self.instance(value, shape=list(value.shape), items=list(walk.items(value.ravel().tolist(), path)))
        if describe_dtype(value.dtype) is None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        if (view := walk.array_view(value)) is not None:
            return self.instance(value, view=view, **({} if value.flags.writeable else {"read_only": True}))
        return value if value.flags.writeable else self.instance(value, read_only=value)

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill an array in place if it has the same dtype and shape."""
        if not isinstance(node, Instance):
            return _restored_array(restore, node, live, path)
        if "view" in node.state:
            return _restored_view(restore, node, live, path)
        if "read_only" not in node.state:
            return _restored_objects(restore, node, live, path)
        saved = node.state["read_only"]
        is_same = type(live) is np.ndarray and not live.flags.writeable and not differences(live, saved)
        found = live if restore.claim(live, path, fits=is_same) else _restored_array(restore, saved, live, path)
        found.setflags(write=False)
        return found


def _restored_view(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    """Return an array in the memory of a weight."""
    base: Any = restore.find(node.state["view"].of)
    if not isinstance(base, Tensor) or not base.is_cpu:
        return restore.mark_stale(path, f"a view of {node.state['view'].of}", live)
    view = in_memory_of(base, node.state["view"]).numpy()
    if "read_only" in node.state:
        view.setflags(write=False)
    is_same = type(live) is np.ndarray and _place(live) == _place(view)
    return restore.record(live if is_same else view, path)


def _place(array: Any) -> tuple[Any, ...]:
    return address_of(array), array.shape, array.strides, array.dtype, array.flags.writeable


def _restored_array(restore: "GraphRestore", saved: Any, live: Any, path: str) -> Any:
    """Return a writable array with the values of `saved`, or a live one that has them."""
    fits = type(live) is np.ndarray and (live.dtype, live.shape) == (saved.dtype, saved.shape)  # no array in a file
    fits = fits and not restore.is_in_weight(live)
    fits = fits and live.flags.writeable  # one closed for writing may be a constant that others read
    if restore.claim(live, path, fits=fits) and restore.arrays.fill(live, saved):
        return live
    return restore.record(saved.copy(order="K"), path)  # in memory of its own, so that it can be resized


def _restored_objects(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    shape = tuple(node.state["shape"])
    if math.prod(shape) != len(node.state["items"]):
        return restore.mark_stale(path, node.kind, live)
    is_array = isinstance(live, np.ndarray) and live.dtype == object
    before = live.ravel().tolist() if is_array else ()
    fits = is_array and live.shape == shape and live.flags.writeable
    target = live if restore.claim(live, path, fits=fits) else restore.record(np.empty(shape, dtype=object), path)
    items = restore.items(node.state["items"], before, path)
    for index, item in zip(np.ndindex(shape), items, strict=True):
        target[index] = item
    return target


class MaskedArrays(Kind):
    """Arrays of numpy with a mask; arrays of objects are opaque."""

    form = "masked array"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is numpy's class, whose module takes a while to load."""
        return kind is getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return data, mask, and what fills the masked places."""
        if describe_dtype(value.dtype) is None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        mask = None if value.mask is np.ma.nomask else value.mask
        parts = {"data": value.data, "mask": mask, "fill": np.asarray(value.fill_value)}
        nodes = {name: walk.node(part, step(path, name)) for name, part in parts.items()}
        return self.instance(value, **nodes, is_hard=value.hardmask)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill an array in place if it has the same dtype and shape."""
        fits = self.matches(type(live))
        before = {"data": live.data, "mask": live.mask} if fits else {}
        parts = {
            name: restore.value(node.state[name], before.get(name, MISSING), step(path, name))
            for name in ("data", "mask", "fill")
        }
        is_filled = fits and parts["data"] is before["data"]
        if not restore.claim(live, path, fits=is_filled):
            live = restore.record(np.ma.MaskedArray(parts["data"]), path)
        live.unshare_mask()
        live.soften_mask()
        live.mask = np.ma.nomask if parts["mask"] is None else parts["mask"]
        live.fill_value = parts["fill"][()]
        if node.state["is_hard"]:
            live.harden_mask()
        return live


class DerivedArrays(Kind):
    """Arrays of classes derived from numpy's, with attributes; others of objects are opaque."""

    form = "derived array"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is such a class."""
        masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", np.memmap)
        return issubclass(kind, np.ndarray) and not issubclass(kind, (np.memmap, masked))

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the values, and the nodes of the attributes."""
        if describe_dtype(value.dtype) is None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        return self.instance(value, array=np.asarray(value), attributes=walk.attributes(attributes_of(value), path))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill an array in place if it has the same dtype and shape."""
        kind: Any = type(live) if kind_name(type(live)) == node.kind else loaded(node.kind)
        array = node.state["array"]
        if not (isinstance(kind, type) and issubclass(kind, np.ndarray)):
            return restore.mark_stale(path, node.kind, live)
        fits = kind_name(type(live)) == node.kind and (live.dtype, live.shape) == (array.dtype, array.shape)
        fits = fits and live.flags.writeable and getattr(live, "mode", None) is None  # not an array in a file
        if not (restore.claim(live, path, fits=fits) and restore.arrays.fill(np.asarray(live), array)):
            live = restore.record(array.view(kind), path)
        restore.attributes(node.state["attributes"], live, path)
        return live


_DERIVED = DerivedArrays()


class MemoryMaps(Kind):
    """Arrays in files.

    Their content is no state; if training can write it, changes are reported.
    """

    form = "memory map"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is numpy's class, or derived from it."""
        return issubclass(kind, np.memmap)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the file, and how it is read."""
        if value.mode is None:  # the result of arithmetic or of `copy`, in memory
            return _DERIVED.describe(walk, value, path)
        walk.meet(value, path)
        if value.flags.writeable:
            walk.large[path] = value
        held = {"dtype": str(value.dtype), "shape": list(value.shape), "offset": value.offset, "mode": value.mode}
        return self.instance(value, file=None if value.filename is None else str(value.filename), **held)

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return the node if no such array is there."""
        return None if is_alike(node, live) else node

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Keep the live array if it has the same shape and dtype."""
        if not is_alike(node, live):
            return restore.mark_stale(path, node.kind, live)
        if [*live.shape] != node.state["shape"] or str(live.dtype) != node.state["dtype"]:
            return restore.mark_stale(path, f"{node.kind} of {node.state['dtype']}{node.state['shape']}", live)
        restore.mark_changed()  # another file may have the same content
        return restore.record(live, path)


class DataTypes(Kind):
    """numpy's data types, which are immutable."""

    form = "dtype"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is a class of data types."""
        return issubclass(kind, np.dtype)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the type as numpy's file format has it; None if it is of objects."""
        description = describe_dtype(value)
        if description is None and value.kind != "O":
            return OPAQUE.describe(walk, value, path)
        return self.instance(value, dtype=description)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the type."""
        return np.dtype(object) if node.state["dtype"] is None else dtype_of(node.state["dtype"])


class Scalars(Kind):
    """numpy's scalars, which are immutable."""

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is a class of scalars."""
        return issubclass(kind, np.generic)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the scalar itself; a restore returns it, too."""
        return value if describe_dtype(value.dtype) is not None else OPAQUE.describe(walk, value, path)


class Records(Scalars):
    """Rows of numpy's arrays of records, which may share the memory of their array."""

    node_types = (np.void, np.record)

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is a class of rows."""
        return issubclass(kind, np.void)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the row itself."""
        walk.meet(value, path)
        return super().describe(walk, value, path)

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill a row in place if it has the same fields."""
        fits = isinstance(live, np.void) and live.dtype == node.dtype and node.dtype.names is not None
        if restore.claim(live, path, fits=fits) and restore.arrays.fill(live, node):
            return live
        return restore.record(node.copy(), path)


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
            target = live if restore.claim(live, path, fits=fits) else restore.record(kind(code), path)
            target[:] = array.array(code, node.state["bytes"].tobytes())
        else:
            target, memory = live, _memory_of(live) if fits else None
            if memory is None or memory.nbytes != node.state["bytes"].size or not restore.claim(live, path, fits=True):
                return restore.mark_stale(path, node.kind, live)
            np.frombuffer(memory, dtype=np.uint8)[:] = node.state["bytes"]
        if "attributes" in node.state:
            restore.attributes(node.state["attributes"], target, path)
        return target


def _memory_of(value: Any) -> memoryview | None:
    is_shared = isinstance(value, multiprocessing.sharedctypes.SynchronizedBase)
    memory = memoryview(value.get_obj() if is_shared else value)
    return memory if memory.format.strip("<>=@!") in _CODES else None
