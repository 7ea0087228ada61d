"""Containers, and the items of objects whose classes are derived from them."""

import copy
import gc
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from midstride.engine.objects.classes import class_called
from midstride.engine.objects.kinds.blocks import describe_block, restored_maxlen
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.objects.kinds.plain import ADDRESSES, CLASSES, PLAIN
from midstride.engine.state.codec import FACTORIES
from midstride.engine.state.hash_table import described_table, fill_set, is_as_described
from midstride.engine.state.object_nodes import Instance, Same, key_path, kind_name, step, value_path

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = [
    "WITH_ITEMS",
    "ByteArrays",
    "Deques",
    "Dicts",
    "Lists",
    "NamedTuples",
    "Proxies",
    "Sets",
    "Tuples",
    "describe_items",
    "is_plain_key",
    "restore_items",
]


def _paired(nodes: Any, live: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of a sequence, each with the live item at its index or MISSING."""
    if not PLAIN.issuperset(map(type, nodes)):
        items = live if isinstance(live, (list, tuple, deque)) else ()
        yield from zip(nodes, chain(items, repeat(MISSING)), strict=False)


class Lists(Kind):
    """Lists."""

    types = node_types = (list,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the items, or a block."""
        walk.meet(value, path)
        return describe_block(walk, value, path) or list(walk.items(value, path))

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the items."""
        return _paired(node, live)

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill a list in place."""
        if restore.keep_whole(node, live, path):
            return live
        before = list(live) if type(live) is list else []
        target = live if restore.claim(live, path, fits=type(live) is list) else restore.record([], path)
        target[:] = restore.items(node, before, path)
        return target


class Tuples(Kind):
    """Tuples; one whose items are the live ones stays."""

    types = node_types = (tuple,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the items."""
        return tuple(walk.items(value, path))

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the items."""
        return _paired(node, live)

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Return a tuple of the restored items."""
        if restore.keep_whole(node, live, path):
            return live
        before = live if type(live) is tuple else ()
        items = restore.items(node, before, path)
        unchanged = len(before) == len(items) and all(map(lambda a, b: a is b, before, items))
        return before if unchanged else tuple(items)


class NamedTuples(Kind):
    """Named tuples."""

    form = "named tuple"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is derived from tuple and has fields."""
        return issubclass(kind, tuple) and hasattr(kind, "_fields")

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the items."""
        return self.instance(value, items=list(walk.items(value, path)))

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the items."""
        return _paired(node.state["items"], live)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return a tuple of that class with the restored items."""
        kind = class_called(node.kind, live, tuple)
        if kind is None:
            return restore.mark_stale(path, node.kind, live)
        if restore.keep_whole(node, live, path):
            return live
        items = restore.items(node.state["items"], live if type(live) is kind else (), path)
        if len(items) != len(kind._fields):
            return restore.mark_stale(path, f"{node.kind} of {len(items)} fields", live)
        return tuple.__new__(kind, items)


class Deques(Kind):
    """Deques."""

    types = node_types = (deque,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the items, or a block."""
        walk.meet(value, path)
        return describe_block(walk, value, path) or deque(walk.items([*value], path), value.maxlen)

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the items."""
        return _paired(node, live)

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill a deque in place."""
        if restore.keep_whole(node, live, path):
            return live
        before = list(live) if type(live) is deque else []
        maxlen = restored_maxlen(restore, node.maxlen, live, path)
        fits = type(live) is deque and live.maxlen == maxlen
        target = live if restore.claim(live, path, fits=fits) else restore.record(deque(maxlen=maxlen), path)
        items = restore.items(node, before, path)
        target.clear()
        target.extend(items)
        return target


class ByteArrays(Kind):
    """Arrays of bytes."""

    types = node_types = (bytearray,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return a copy."""
        walk.meet(value, path)
        return bytearray(value)

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill a bytearray in place."""
        target = live if restore.claim(live, path, fits=type(live) is bytearray) else restore.record(bytearray(), path)
        target[:] = node
        return target


class Dicts(Kind):
    """Dicts.

    A node is a dict if all keys are plain and a factory is known by name, else an instance: `empty` is the dict without
    items, `factory` the node of its factory. Its items are in `items`, or in `keys` and `values` if keys are objects.
    """

    form = "dict"
    types = node_types = (dict, OrderedDict, Counter, defaultdict)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the items."""
        walk.meet(value, path)
        state = {}
        if isinstance(value, defaultdict) and not any(value.default_factory is known for known in FACTORIES.values()):
            state["factory"] = _factory_node(walk, value.default_factory, path)
        empty = type(value)() if state else _empty_like(value)
        pairs = [*value.items()]  # a thread may change it meanwhile
        keys = [_key_node(walk, key, item, path, index) for index, (key, item) in enumerate(pairs)]
        if not all(map(is_plain_key, keys)):
            nodes = [walk.node(item, value_path(path, index)) for index, (_, item) in enumerate(pairs)]
            return self.instance(value, empty=empty, keys=keys, values=nodes, **state)
        items = {node: walk.node(item, step(path, key)) for node, (key, item) in zip(keys, pairs, strict=True)}
        if state:
            return self.instance(value, empty=empty, items=items, **state)
        empty.update(items)
        return empty

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the values."""
        before = live if isinstance(live, dict) else {}
        state = node.state if isinstance(node, Instance) else {"items": node}
        yield from ((part, before.get(key, MISSING)) for key, part in state.get("items", {}).items())
        yield from _paired(state.get("values", ()), [*before.values()])

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill a dict in place; its factory is that of the live dict, or found by name."""
        empty = node.state["empty"] if isinstance(node, Instance) else _empty_like(node)
        fits = type(live) is type(empty)
        factory = empty.default_factory if isinstance(empty, defaultdict) else None
        if isinstance(node, Instance) and "factory" in node.state:
            factory = _restored_factory(restore, node, live, path)
            if factory is MISSING:
                return restore.mark_stale(path, node.kind, live)
        elif fits and isinstance(live, defaultdict):
            fits = live.default_factory is factory
        before = list(live.items()) if isinstance(live, dict) else []
        target: Any = live if restore.claim(live, path, fits=fits) else restore.record(copy.copy(empty), path)
        if isinstance(target, defaultdict):
            target.default_factory = factory
        pairs = _restored_pairs(restore, node, before, path)
        target.clear()
        for key, value in pairs:  # a Counter would count in `update`
            target[key] = value
        return target


class Proxies(Kind):
    """Views of a dict: read-only ones, and those of its keys, values and items."""

    form = "proxy"
    is_filled = False
    types: ClassVar[tuple[Any, ...]] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of the dict."""
        of = gc.get_referents(value)[0]  # Python shows it to its collector alone
        if type(of) is not dict or "__dict__" in of:  # of a class
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        return self.instance(value, of=walk.node(of, step(path, "of")))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return a view of the restored dict."""
        kind = next((kind for kind in self.types if kind_name(kind) == node.kind), None)
        before = gc.get_referents(live)[0] if type(live) is kind else MISSING
        after = restore.value(node.state["of"], before, step(path, "of"))
        if kind is None or not isinstance(after, dict):
            return restore.mark_stale(path, node.kind, live)
        views = (types.MappingProxyType(after), after.keys(), after.values(), after.items())
        return live if after is before else restore.record(views[self.types.index(kind)], path)


def _empty_like(value: Any) -> Any:
    return defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()


def _factory_node(walk: "GraphWalk", factory: Any, path: str) -> Any:
    """Return the node of the factory of a defaultdict."""
    where = step(path, "default_factory")
    return CLASSES.describe(walk, factory, where) if isinstance(factory, type) else walk.node(factory, where)


def _restored_factory(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    own = live.default_factory if isinstance(live, defaultdict) else MISSING
    return restore.value(node.state["factory"], own, step(path, "default_factory"))


def _key_node(walk: "GraphWalk", key: Any, item: Any, path: str, index: int) -> Any:
    if type(key) is int and key == id(item) and type(item) not in PLAIN and key not in walk.anchors:
        return ADDRESSES.of(value_path(path, index))
    if type(key) in PLAIN and not walk.is_address(key):
        return key
    node = walk.node(key, where := key_path(path, index))
    if where in walk.opaque:  # named once, however many keys there come to be
        walk.opaque[f"{path} (a key)"] = walk.opaque.pop(where)
    return node


def is_plain_key(node: Any) -> bool:
    """Return whether a key with this node has the same value and text in each attempt."""
    if isinstance(node, Instance):
        is_tuple = node.form == NamedTuples.form
        return node.form in ("enum", "value") or (is_tuple and all(map(is_plain_key, node.state["items"])))
    if type(node) is tuple:
        return all(map(is_plain_key, node))
    return isinstance(node, np.generic) or (type(node) in PLAIN and node == node)


def _restored_pairs(
    restore: "GraphRestore", node: Any, before: list[tuple[Any, Any]], path: str
) -> list[tuple[Any, Any]]:
    """Return keys and values of a dict; drop, with a warning, keys that cannot be rebuilt."""
    state = node.state if isinstance(node, Instance) else {"items": node}
    if "keys" in state:
        found = enumerate(zip(state["keys"], state["values"], strict=True))
        named = [(key, value, key_path(path, index)) for index, (key, value) in found]
    else:
        named = [(key, value, "") for key, value in state["items"].items()]
    by_key, pairs = dict(before), []
    for index, (key_node, value_node, where) in enumerate(named):
        live_key, live_value = before[index] if index < len(before) else (MISSING, MISSING)
        if isinstance(key_node, Instance) and key_node == ADDRESSES.of(value_path(path, index)):
            value = restore.value(value_node, live_value, value_path(path, index))
            pairs += [(id(value), value)] if value is not MISSING else []
            continue
        key = restore.value(key_node, _fillable(key_node, live_key) if where else live_key, where or f"{path} (a key)")
        live = live_value if key is live_key else by_key.get(key, MISSING)
        value = restore.value(value_node, live, value_path(path, index) if where else step(path, key))
        if where not in restore.stale and key is not MISSING and value is not MISSING:
            pairs.append((key, value))
    return pairs


class Sets(Kind):
    """Sets: `items` in order of iteration, with `table` if insertions alone differ from it.

    Of a set of objects, `members` are the nodes.
    """

    form = "set"
    types = (set, frozenset)

    def fills(self, value: Any) -> bool:
        """Return whether `value` is a set that can change."""
        return type(value) is set

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the items."""
        walk.meet(value, path)
        if all(type(item) in PLAIN or _is_plain_tuple(item) for item in value):
            items = list(walk.items(value, path))
            if any(isinstance(item, Instance) for item in items):  # addresses, which have no lasting order
                items.sort(key=lambda item: item.state["of"].path if isinstance(item, Instance) else "")
            return self.instance(value, items=items, **described_table(value, items))
        nodes = [walk.node(item, f"{path}/{index}") for index, item in enumerate(walk.met_first(value))]
        if not all(map(_is_rebuilt, nodes)):
            return OPAQUE.describe(walk, value, path)
        return self.instance(value, members=nodes)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill a set in place, such that it iterates in the recorded order."""
        fits = isinstance(live, (set, frozenset)) and kind_name(type(live)) == node.kind
        return (_restore_members if "members" in node.state else _restore_plain)(restore, node, live, path, fits=fits)


def _restore_plain(restore: "GraphRestore", node: Instance, live: Any, path: str, *, fits: bool) -> Any:
    items, table = restore.items(node.state["items"], (), path), node.state.get("table")
    has_addresses = items != node.state["items"]  # which have no order that two attempts share
    if fits and (is_as_described(live, items, table) or (has_addresses and live == set(items))):
        return live
    is_set = node.kind == "builtins:set"
    found: Any = live if is_set and restore.claim(live, path, fits=type(live) is set) else set()
    is_same = fill_set(found, items, table)
    if not is_set:
        found = next((one for one in (frozenset(items), frozenset(found)) if list(one) == items), frozenset(found))
        is_same = list(found) == items
    if not (is_same or has_addresses):
        restore.reordered.append(path)
    return restore.record(found, path)


def _restore_members(restore: "GraphRestore", node: Instance, live: Any, path: str, *, fits: bool) -> Any:
    before = list(live) if fits else []
    items = list(_members(restore, node.state["members"], before, path))
    is_ordered = not any(map(_is_by_address, items))
    if fits and (_ids(items) == _ids(before) if is_ordered else set(_ids(items)) == set(_ids(before))):
        return restore.record(live, path)
    is_set = node.kind == "builtins:set"
    target: Any = live if is_set and restore.claim(live, path, fits=fits) else set()
    if is_ordered:
        is_same = fill_set(target, items)
    else:
        target.clear()
        target.update(items)
        is_same = _ids(list(target)) == _ids(items)
    if not is_same:
        restore.reordered.append(path)
    return restore.record(target if is_set else frozenset(target), path)


def _members(restore: "GraphRestore", nodes: list[Any], before: list[Any], path: str) -> Iterator[Any]:
    """Yield the restored items: those in other parts of the state, then the others in order.

    The order is that of live items.
    """
    kept: set[int] = set()
    others: Iterator[Any] | None = None
    for index, node in enumerate(nodes):
        if not isinstance(node, Same) and others is None:
            others = iter([item for item in before if id(item) not in kept])
        live = MISSING if others is None else next(others, MISSING)
        item = restore.value(node, _fillable(node, live), f"{path}/{index}")
        kept.add(id(item))
        if f"{path}/{index}" not in restore.stale:
            yield item


#: forms of nodes whose objects can be rebuilt as items of a set
_REBUILT = frozenset({"address", "derived", "enum", NamedTuples.form, "object", Sets.form, "value"})


def _is_rebuilt(node: Any) -> bool:
    """Return whether an item of a set can be rebuilt from this node."""
    if isinstance(node, Instance):
        return node.form in _REBUILT
    if type(node) is tuple:
        return all(map(_is_rebuilt, node))
    return type(node) in PLAIN or isinstance(node, (Same, Tensor, np.generic))


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in PLAIN or _is_plain_tuple(item) for item in value)


def _fillable(node: Any, live: Any) -> Any:
    """Return `live` if it may be filled in place, unlike items hashed by value."""
    is_opaque = isinstance(node, Instance) and node.form == OPAQUE.form
    return live if is_opaque or _is_by_address(live) else MISSING


def _is_by_address(item: Any) -> bool:
    by_address: Any = object.__hash__
    return isinstance(item, Tensor) or type(item).__hash__ is by_address


def _ids(items: list[Any]) -> list[int]:
    return [id(item) for item in items]


#: containers of which the user's classes are derived
WITH_ITEMS = (dict, list, set, deque)


def describe_items(walk: "GraphWalk", value: Any, path: str) -> Any:
    """Return the node of the items of an object whose class is derived from a container."""
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        items = dict(base.items(value))
        own = defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else items
        return _DICTS.describe(walk, own, path)
    if isinstance(value, deque):
        return _DEQUES.describe(walk, deque(_own_items(value), value.maxlen), path)
    return _LISTS.describe(walk, _own_items(value), path)


def _own_items(value: Any) -> list[Any]:
    """Return the items of a list, a set or a deque, past any `__iter__` of its class."""
    kind: Any = next(kind for kind in (list, set, deque) if isinstance(value, kind))
    return list(kind.__iter__(value))


def restore_items(restore: "GraphRestore", node: Any, live: Any, path: str) -> None:
    """Restore the items of an object whose class is derived from a container."""
    if isinstance(live, dict):
        if isinstance(live, defaultdict):
            _restore_own_factory(restore, node, live, path)
        pairs = _restored_pairs(restore, node, list(dict(live).items()), path)
        kind: Any = OrderedDict if isinstance(live, OrderedDict) else dict
        kind.clear(live)
        for key, value in pairs:
            kind.__setitem__(live, key, value)
    elif isinstance(live, set):
        fill_set(live, restore.items(node, (), path))
    elif isinstance(live, list):
        list.__setitem__(live, slice(None), restore.items(node, _own_items(live), path))
    elif isinstance(live, deque):
        maxlen = live.maxlen  # of a list, if its class was another then
        if isinstance(node, deque):
            maxlen = restored_maxlen(restore, node.maxlen, live, path)
        deque.__init__(live, restore.items(node, _own_items(live), path), maxlen)


def _restore_own_factory(restore: "GraphRestore", node: Any, live: Any, path: str) -> None:
    if isinstance(node, Instance) and "factory" in node.state:
        factory = _restored_factory(restore, node, live, path)
    else:
        empty = node.state["empty"] if isinstance(node, Instance) else node
        factory = empty.default_factory if isinstance(empty, defaultdict) else MISSING
    live.default_factory = live.default_factory if factory is MISSING else factory


_LISTS, _DEQUES, _DICTS = Lists(), Deques(), Dicts()
