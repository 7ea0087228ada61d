"""Keys of dicts and items of sets that are objects, whose hash may differ in the next attempt."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from midstride.engine.objects.containers import MISSING, Restore, refill
from midstride.engine.objects.plain_values import PLAIN, key_path, kind_name, step, value_path
from midstride.engine.state.hash_table import fill_set
from midstride.engine.state.object_nodes import Instance, Same

__all__ = ["fill_keyed", "is_writable_item", "keyed", "members"]

#: forms of nodes whose objects can be rebuilt as items of a set
_MADE_ANEW = frozenset({"address", "derived", "enum", "members", "named tuple", "object", "set", "value"})


def is_writable_item(node: Any) -> bool:
    """Return whether the item can be rebuilt from this node."""
    if isinstance(node, Instance):
        return node.form in _MADE_ANEW
    if type(node) is tuple:
        return all(map(is_writable_item, node))
    return type(node) in PLAIN or isinstance(node, (Same, Tensor, np.generic))


def keyed(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a dict whose keys are objects; a factory is that of the live dict, or found by name."""
    empty, factory = node.state["empty"], node.state.get("factory")
    own: Any = live.default_factory if isinstance(live, defaultdict) else MISSING
    made_by = own if factory is None else restore.put(factory, own, step(path, "default_factory"))
    if factory is not None and made_by is MISSING:
        return restore.mark_stale(path, node.kind, live)
    fits = type(live) is type(empty) and (factory is not None or own is getattr(empty, "default_factory", MISSING))
    before = list(live.items()) if isinstance(live, dict) else []
    target: Any = live if restore.use(live, path, fits=fits) else restore.set(copy.copy(empty), path)
    if factory is not None:
        target.default_factory = made_by
    fill_keyed(restore, node, target, before, path)
    return target


def fill_keyed(restore: Restore, node: Instance, target: Any, before: list[tuple[Any, Any]], path: str) -> None:
    """Fill `target` with the keys and values of `node`; a key that cannot be rebuilt is left out with a warning."""
    by_key = dict(before)
    pairs = []
    for index, (key_node, value_node) in enumerate(zip(node.state["keys"], node.state["values"], strict=True)):
        live_key, live_value = before[index] if index < len(before) else (MISSING, MISSING)
        key = restore.put(key_node, _fillable(key_node, live_key), key_path(path, index))
        live = live_value if key is live_key else by_key.get(key, MISSING)
        value = restore.put(value_node, live, value_path(path, index))
        if key_path(path, index) not in restore.stale and value is not MISSING:
            pairs.append((key, value))
    refill(target, pairs)


def members(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a set of objects."""
    fits = isinstance(live, (set, frozenset)) and kind_name(type(live)) == node.kind
    before = list(live) if fits else []
    items = list(_items(restore, node.state["items"], before, path))
    is_ordered = not any(map(_is_by_address, items))
    if fits and (_ids(items) == _ids(before) if is_ordered else set(_ids(items)) == set(_ids(before))):
        return restore.set(live, path)
    is_set = node.kind == "builtins:set"
    target: Any = live if is_set and restore.use(live, path, fits=fits) else set()
    if is_ordered:
        is_same = fill_set(target, items)
    else:
        target.clear()
        target.update(items)
        is_same = _ids(list(target)) == _ids(items)
    if not is_same:
        restore.reordered.append(path)
    return restore.set(target if is_set else frozenset(target), path)


def _items(restore: Restore, nodes: list[Any], before: list[Any], path: str) -> Iterator[Any]:
    """Yield the restored items: first those in other parts of the state, then the others in the order of live ones."""
    kept: set[int] = set()
    others: Iterator[Any] | None = None
    for index, node in enumerate(nodes):
        if not isinstance(node, Same) and others is None:
            others = iter([item for item in before if id(item) not in kept])
        live = MISSING if others is None else next(others, MISSING)
        item = restore.put(node, _fillable(node, live), f"{path}/{index}")
        kept.add(id(item))
        if f"{path}/{index}" not in restore.stale:
            yield item


def _fillable(node: Any, live: Any) -> Any:
    """Return `live` if it may be filled in place, which items that are hashed by their value must not be."""
    is_opaque = isinstance(node, Instance) and node.form == "opaque"
    return live if is_opaque or _is_by_address(live) else MISSING


def _is_by_address(item: Any) -> bool:
    by_address: Any = object.__hash__
    return isinstance(item, Tensor) or type(item).__hash__ is by_address


def _ids(items: list[Any]) -> list[int]:
    return [id(item) for item in items]
