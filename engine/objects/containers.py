"""Restores values, tensors and containers: one function for each type of node."""

import itertools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from midstride.engine.objects.changes import CodeChange
from midstride.engine.objects.plain_values import PLAIN, is_plain_key, step
from midstride.engine.objects.restored_memory import RestoredMemory
from midstride.engine.state.object_nodes import Instance, Same, View

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "KINDS",
    "MISSING",
    "Restore",
    "fill_defaultdict",
    "fill_dict",
    "items_of",
    "leaf_like",
    "on_device",
    "refill",
    "with_gradient",
]

#: placeholder for a value that a live object does not have
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()


class Restore(Protocol):
    """The members of a `GraphRestore` that functions which put values back use."""

    device: torch.device
    memory: RestoredMemory
    change: CodeChange
    reordered: list[str]
    stale: dict[str, str]
    is_old: bool

    @property
    def sharded_weight(self) -> "DTensor | None":
        """A parameter that is sharded over the ranks; None if there is none."""
        ...

    def put(self, node: Any, live: Any, path: str) -> Any:
        """Return the value for `path`: `live`, filled with the values of `node`, wherever that is possible.

        MISSING if the value cannot be restored and there is no live one.
        """
        ...

    def skip(self, node: Any, path: str) -> None:
        """Build the objects of `node`, which other nodes may refer to, without setting a value at `path`."""
        ...

    def use(self, live: Any, path: str, *, fits: bool) -> bool:
        """Return whether `live` may be filled for `path`."""
        ...

    def is_anchor(self, live: Any) -> bool:
        """Return whether the object `live` is in another part of the state."""
        ...

    def is_left_out(self, live: Any) -> bool:
        """Return whether the object `live` would be left out of a snapshot: large, shared, or nested too deep."""
        ...

    def takes(self, live: Any, node: Tensor, *, was_on_host: bool) -> bool:
        """Return whether the tensor `live` can take the values of `node`, and is on the host or not as that was."""
        ...

    def weight_at(self, rows: Tensor) -> str | None:
        """Return the name of the parameter whose rows on this rank are `rows`, in the same memory."""
        ...

    def set(self, value: Any, path: str) -> Any:
        """Record `value` as the value at `path`, and return it."""
        ...

    def find(self, name: str) -> Any:
        """Return the object at a path of this tree, or in another part of the state; MISSING if there is none."""
        ...

    def find_function(self, kind: str, code: str | None) -> types.FunctionType | None:
        """Return the function called `kind` in a snapshot, by the digest of its code if there are several; or None."""
        ...

    def read_back(self) -> None:
        """Record that a walk of the live objects will give other nodes than the snapshot's."""
        ...

    def mark_stale(self, path: str, was: str, live: Any) -> Any:
        """Record that the value at `path` cannot be restored; return `live`, which stays and may be MISSING."""
        ...


def _same(restore: Restore, node: Same, live: Any, path: str) -> Any:
    found = restore.find(node.path)
    return restore.mark_stale(path, f"the same as {node.path}", live) if found is MISSING else found


def _view(restore: Restore, node: View, live: Any, path: str) -> Any:
    base: Any = restore.find(node.of)
    if not isinstance(base, Tensor):
        return restore.mark_stale(path, f"a view of {node.of}", live)
    view = base.detach().as_strided(node.shape, node.strides, base.storage_offset() + node.offset)
    if isinstance(live, Tensor) and _is_same_view(live, view):
        return restore.set(live, path)
    return restore.set(view, path)


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    alike = (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
    return alike and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


def _tensor(restore: Restore, node: Tensor, live: Any, path: str) -> Any:
    if restore.use(live, path, fits=restore.takes(live, node, was_on_host=True)):
        _fill(restore, live, node)
        return live
    plain = node.detach()
    placed = restore.memory.place(plain, was_on_host=True)
    return restore.set(node if placed is plain else leaf_like(node, placed), path)


def on_device(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a tensor that was on an accelerator."""
    value = node.state["value"]
    if restore.use(live, path, fits=restore.takes(live, value, was_on_host=False)):
        _fill(restore, live, value)
        return live
    return restore.set(leaf_like(value, restore.memory.place(value.detach(), was_on_host=False)), path)


def _fill(restore: Restore, live: Tensor, value: Tensor) -> None:
    restore.memory.take(live, value)
    with torch.no_grad():
        live.detach().copy_(value)


def leaf_like(value: Tensor, placed: Tensor) -> Tensor:
    """Return `placed` as a leaf of the same class and `requires_grad` as `value`."""
    if type(value) is nn.Parameter:
        return nn.Parameter(placed, requires_grad=value.requires_grad)
    return placed.requires_grad_(value.requires_grad)


def with_gradient(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a tensor with a gradient that is not a parameter of the module."""
    before = live.grad if isinstance(live, Tensor) and live.is_leaf else None
    target: Any = restore.put(node.state["value"], live, path)
    gradient = restore.put(node.state["gradient"], MISSING if before is None else before, step(path, "grad"))
    if gradient is not before:
        target.grad = gradient
    return target


def _array(restore: Restore, node: Any, live: Any, path: str) -> Any:
    fits = isinstance(live, np.ndarray) and (live.dtype, live.shape) == (node.dtype, node.shape)
    if restore.use(live, path, fits=fits and live.flags.writeable):
        live[...] = node
        return live
    return restore.set(node, path)


def _bytes(restore: Restore, node: bytearray, live: Any, path: str) -> Any:
    target = live if restore.use(live, path, fits=type(live) is bytearray) else restore.set(bytearray(), path)
    target[:] = node
    return target


def _list(restore: Restore, node: list[Any], live: Any, path: str) -> Any:
    before = list(live) if type(live) is list else []
    target = live if restore.use(live, path, fits=type(live) is list) else restore.set([], path)
    target[:] = items_of(restore, node, before, path)
    return target


def items_of(restore: Restore, nodes: Any, before: Any, path: str) -> list[Any]:
    """Return the items that `nodes` describe, each filled into the live item at its index."""
    if PLAIN.issuperset(map(type, nodes)):
        return list(nodes)
    padded = itertools.chain(before, itertools.repeat(MISSING))
    pairs = enumerate(zip(nodes, padded, strict=False))
    items = (restore.put(node, live, f"{path}/{index}") for index, (node, live) in pairs)
    return [None if item is MISSING else item for item in items]  # others keep their places


def _tuple(restore: Restore, node: tuple[Any, ...], live: Any, path: str) -> Any:
    before = live if type(live) is tuple else ()
    items = items_of(restore, node, before, path)
    unchanged = len(before) == len(items) and all(map(lambda a, b: a is b, before, items))
    return before if unchanged else tuple(items)


def _deque(restore: Restore, node: deque[Any], live: Any, path: str) -> Any:
    before = list(live) if type(live) is deque else []
    fits = type(live) is deque and live.maxlen == node.maxlen
    target = live if restore.use(live, path, fits=fits) else restore.set(deque(maxlen=node.maxlen), path)
    items = items_of(restore, node, before, path)
    target.clear()
    target.extend(items)
    return target


def _dict(restore: Restore, node: dict[Any, Any], live: Any, path: str) -> Any:
    fits = type(live) is type(node)
    if fits and isinstance(node, defaultdict):
        fits = live.default_factory is node.default_factory
    made = defaultdict(node.default_factory) if isinstance(node, defaultdict) else type(node)()
    before = dict(live) if isinstance(live, dict) else {}
    target = live if restore.use(live, path, fits=fits) else restore.set(made, path)
    fill_dict(restore, node, target, before, path)
    return target


def fill_dict(restore: Restore, node: dict[Any, Any], target: Any, before: dict[Any, Any], path: str) -> None:
    """Fill a dict with the items of `node`, in their order; each value is filled into the live value of its key."""
    live_keys = list(before)
    pairs = []
    restore.is_old |= not all(map(is_plain_key, node))  # earlier versions knew no dicts whose keys are objects
    for index, (key, item) in enumerate(node.items()):
        found = restore.put(key, MISSING, f"{path} (a key)") if not _is_unknown_key(restore, key) else MISSING
        if found is MISSING:  # only the live object knows it
            if index >= len(live_keys):
                restore.mark_stale(f"{path} (a key)", "another", MISSING)
                continue
            found = live_keys[index]
        pairs.append((found, restore.put(item, before.get(found, MISSING), step(path, found))))
    refill(target, [pair for pair in pairs if pair[1] is not MISSING])


def refill(target: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Replace the items of a dict by `pairs`."""
    dict.clear(target) if not hasattr(target, "move_to_end") else target.clear()
    for key, value in pairs:
        target[key] = value


def _is_unknown_key(restore: Restore, key: Any) -> bool:
    return isinstance(key, Same) and restore.find(key.path) is MISSING


def fill_defaultdict(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a defaultdict whose factory is a function or a class: that of the live dict, or found by name."""
    has_own = type(live) is defaultdict
    factory = live.default_factory if has_own else MISSING
    if "factory" in node.state:
        factory = restore.put(node.state["factory"], factory, step(path, "default_factory"))
    if factory is MISSING:
        return restore.mark_stale(path, node.kind, live)
    target = live if restore.use(live, path, fits=has_own) else restore.set(defaultdict(), path)
    target.default_factory = factory
    fill_dict(restore, node.state["items"], target, dict(target), path)
    return target


KINDS: dict[type, Callable[[Restore, Any, Any, str], Any]] = {
    **{Same: _same, View: _view, list: _list, tuple: _tuple, deque: _deque, np.ndarray: _array},
    bytearray: _bytes,
    **dict.fromkeys((Tensor, nn.Parameter, nn.Buffer), _tensor),
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), _dict),
}
