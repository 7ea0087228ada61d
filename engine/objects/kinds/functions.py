"""Functions with their closures, methods, partials, weak references and containers of these."""

import functools
import gc
import inspect
import types
import weakref
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from torch import Tensor

from midstride.engine.code_origin import is_user_file
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.classes import class_called, is_library
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.state.object_nodes import Instance, key_path, kind_name, kind_text, step, value_path

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = [
    "Cached",
    "Functions",
    "Methods",
    "Partials",
    "WeakContainers",
    "WeakReferences",
    "code_digest",
    "describe_cache",
    "digest_of_code",
    "is_users_cache",
]


class Functions(Kind):
    """Functions: this attempt's code, with a snapshot's closures, changed defaults, attributes."""

    form = "function"
    is_filled = False
    types = (types.FunctionType,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the name, and the nodes of the values that the function holds."""
        walk.meet(value, path)
        kind = kind_text(value.__module__, value.__qualname__)
        digest = code_digest(value)
        walk.constants[path] = kind if digest is None else f"{kind} {digest}"
        walk.functions.add(path)
        if not is_user_file(value.__code__.co_filename):
            return Instance(self.form, kind)
        cells = {
            name: walk.node(cell.cell_contents, step(path, name))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            if cell != types.CellType()  # bound
        }
        defaults = {
            name: walk.node(getattr(value, name), step(path, name))
            for name in ("__defaults__", "__kwdefaults__")
            if not _is_constant(walk, getattr(value, name))
        }
        parts = {"cells": cells, "attributes": walk.attributes(vars(value), path)}
        code = {"code": digest} if digest is not None else {}
        held = {name: nodes for name, nodes in parts.items() if nodes}
        return Instance(self.form, kind, {**code, **held, **defaults})

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return the node if no such function is found."""
        is_found = _is_called(live, node.kind) or restore.find_function(node.kind, node.state.get("code")) is not None
        return None if is_found else node

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill the values in the closure of the live function, or of one of that name, in place."""
        code = node.state.get("code")
        is_same = _is_called(live, node.kind)
        if not is_same or (code is not None and code_digest(live) != code):
            found = restore.find_function(node.kind, code)
            if not is_same and not restore.claim(found, path, fits=found is not None):
                if found is None or found.__code__.co_freevars:
                    return restore.mark_stale(path, node.kind, live)
                found = _copied(found)  # each object of a class may have its own
            live = live if found is None else found
        if code is not None and code_digest(live) != code:  # the code was changed since the snapshot
            restore.mark_changed()
        restore.record(live, path)
        _restore_closure(restore, node, live, path)
        for name in node.state.keys() & {"__defaults__", "__kwdefaults__"}:
            before = getattr(live, name)
            after = restore.value(node.state[name], before, step(path, name))
            if after is not before:
                setattr(live, name, after)
        if "attributes" in node.state:
            restore.attributes(node.state["attributes"], live, path)
        return live


def _copied(function: types.FunctionType) -> types.FunctionType:
    """Return another function with the same code, which has no closure."""
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    setattr(made, "__kwdefaults__", function.__kwdefaults__)  # noqa: B010  # an attribute of Python's
    return made


def _is_called(live: Any, kind: str) -> bool:
    return isinstance(live, types.FunctionType) and kind_text(live.__module__, live.__qualname__) == kind


def _restore_closure(restore: "GraphRestore", node: Instance, live: types.FunctionType, path: str) -> None:
    cells = dict(zip(live.__code__.co_freevars, live.__closure__ or (), strict=True))
    for name, child in node.state.get("cells", {}).items():
        cell = cells.get(name, types.CellType())
        before = cell.cell_contents if cell != types.CellType() else MISSING
        after = restore.value(child, before, step(path, name))
        if after is not before and after is not MISSING:
            cell.cell_contents = after


def _is_constant(walk: "GraphWalk", defaults: Any) -> bool:
    """Return whether all defaults of a function are plain, or not written to snapshots."""
    values = defaults.values() if isinstance(defaults, dict) else defaults or ()
    return all(type(value) in PLAIN or not walk.is_described(type(value)) for value in values)


def code_digest(function: types.FunctionType) -> str | None:
    """Return a digest of a function's code if its name may not be unique, else None.

    The digest does not depend on line numbers or on the values in the closure.
    """
    if "<" not in function.__qualname__:
        return None
    return digest_of_code(function.__code__)


@lru_cache(maxsize=1024)  # asked at every snapshot
def digest_of_code(code: types.CodeType) -> str:
    """Return a digest of `code`, equal in every process and at any position in its file."""
    return xxhash.xxh3_64_hexdigest(repr(_content(code)).encode())


def _content(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        code = constant
        named = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return (code.co_code, named, code.co_flags, [_content(inner) for inner in code.co_consts])
    if isinstance(constant, frozenset):  # whose order differs from process to process
        return sorted(repr(_content(item)) for item in constant)
    return [_content(item) for item in constant] if isinstance(constant, tuple) else constant


_METHODS = (types.MethodType, types.BuiltinMethodType)


class Methods(Kind):
    """Bound methods."""

    form = "method"
    types = _METHODS

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return a method's object; a built-in function, or an opaque object's method, is constant."""
        function = getattr(value, "__func__", value)
        name = getattr(function, "__qualname__", type(function).__qualname__)  # a partial has none
        kind = kind_text(getattr(function, "__module__", "?"), name)
        owner = value.__self__
        is_kept = id(owner) in walk.anchors or walk.is_described(type(owner))
        own = getattr(type(owner), name.rpartition(".")[2], None)
        is_named = own is function or not hasattr(value, "__func__")
        if owner is None or isinstance(owner, type) or not (is_kept and is_named):
            walk.constants[path] = kind
            return Instance(OPAQUE.form, kind)
        return Instance(self.form, kind, {"of": walk.node(owner, step(path, "__self__"))})

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the object of the method."""
        yield node.state["of"], getattr(live, "__self__", MISSING)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the method of the restored object."""
        is_method = isinstance(live, _METHODS)
        owner = restore.value(node.state["of"], live.__self__ if is_method else MISSING, step(path, "__self__"))
        name = node.kind.rpartition(".")[2]
        if is_method and live.__name__ == name and live.__self__ is owner:
            return live
        # Not a method of a path: a damaged or hostile snapshot could name one that deletes files.
        method = None if isinstance(owner, PurePath) else getattr(owner, name, None)
        if not isinstance(method, _METHODS) or method.__self__ is not owner:
            return restore.mark_stale(path, node.kind, live)
        return method


class Partials(Kind):
    """Partials, and objects of the user's classes derived from them."""

    form = "partial"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is partial, or the user's and derived from it."""
        return kind is partial or (issubclass(kind, partial) and not is_library(kind))

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of function and arguments."""
        walk.meet(value, path)
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        node = self.instance(value, **{name: walk.node(item, step(path, name)) for name, item in parts.items()})
        if attributes := walk.attributes(attributes_of(value), path):
            node.state["attributes"] = attributes
        return node

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield function and arguments."""
        yield from ((node.state[name], getattr(live, name, MISSING)) for name in ("func", "args", "keywords"))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill a partial in place."""
        kind = class_called(node.kind, live, partial) if node.kind != kind_name(partial) else partial
        fits = type(live) is kind
        before = {name: getattr(live, name) if fits else MISSING for name in ("func", "args", "keywords")}
        after = {name: restore.value(node.state[name], before[name], step(path, name)) for name in before}
        if kind is None or not callable(after["func"]):
            return restore.mark_stale(path, node.kind, live)
        if not restore.claim(live, path, fits=fits):
            live = restore.record(partial.__new__(kind, after["func"], *after["args"], **after["keywords"]), path)
        else:
            live.__setstate__((after["func"], after["args"], after["keywords"], vars(live)))
        restore.attributes(node.state.get("attributes", {}), live, path)
        return live


class WeakReferences(Kind):
    """Weak references without a callback, also to methods, and weak proxies."""

    form = "weak"
    is_filled = False
    types = (weakref.ref, weakref.WeakMethod, *weakref.ProxyTypes)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of the object, which other references keep alive."""
        if _calls_back(value):
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        target = _target_of(value)
        return self.instance(value, **({} if target is None else {"of": walk.node(target, step(path, "of"))}))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return a reference to the restored object, or a dead one."""
        make: Any = _WEAK.get(node.kind, weakref.proxy)
        fits = live is not MISSING and kind_name(type(live)) == node.kind
        before = _target_of(live) if fits else None
        if "of" not in node.state:
            target = _Gone().gone if make is weakref.WeakMethod else _Gone()
            return live if fits and before is None else restore.record(make(target), path)
        after = restore.value(node.state["of"], MISSING if before is None else before, step(path, "of"))
        if after is MISSING:
            return restore.mark_stale(path, node.kind, live)
        try:
            return live if after is before else restore.record(make(after), path)
        except TypeError:  # its class has no room for one
            return restore.mark_stale(path, node.kind, live)


_WEAK = {kind_name(kind): kind for kind in (weakref.ref, weakref.WeakMethod)}


def _calls_back(value: Any) -> bool:
    """Return whether a weak reference calls a function of the user's when its object is gone."""
    callback: Any = value.__callback__ if type(value) in _WEAK.values() else None
    if type(value) is weakref.WeakMethod and callback is not None:
        # Its own, with the user's in the closure.
        callback = inspect.getclosurevars(callback).nonlocals.get("callback")
    return callback is not None


def _target_of(value: Any) -> Any:
    """Return the object of a weak reference or proxy; None if it is gone."""
    if type(value) in _WEAK.values():
        return value()
    try:
        return value.__repr__.__self__  # a proxy hands out the object's own methods
    except ReferenceError:
        return None


class WeakContainers(Kind):
    """Sets and dicts that hold their items, keys or values weakly."""

    form = "weak container"
    types = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the nodes of the items, which other references keep alive."""
        if walk.is_in_library:  # which makes it in each process
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        items = [(item, None) for item in walk.met_first(value)] if type(value) is weakref.WeakSet else [*value.items()]
        pairs = [
            (walk.node(key, key_path(path, index)), walk.node(item, value_path(path, index)))
            for index, (key, item) in enumerate(items)
        ]
        return self.instance(value, keys=[key for key, _ in pairs], values=[item for _, item in pairs])

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill a container in place with the restored items."""
        kind = next((kind for kind in self.types if kind_name(kind) == node.kind), None)
        if kind is None:
            return restore.mark_stale(path, node.kind, live)
        target = live if restore.claim(live, path, fits=type(live) is kind) else restore.record(kind(), path)
        pairs = []
        for index, (key, item) in enumerate(zip(node.state["keys"], node.state["values"], strict=True)):
            pair = [
                restore.value(one, MISSING, where)
                for one, where in ((key, key_path(path, index)), (item, value_path(path, index)))
            ]
            if not any(part is MISSING for part in pair):
                pairs.append(pair)
        target.clear()
        for key, item in pairs:
            if kind is weakref.WeakSet:
                target.add(key)
            else:
                target[key] = item
        return target


class _Gone:
    """A weak reference to a new instance of this class is dead at once."""

    def gone(self) -> None:
        """Do nothing."""


#: the class of functions that cache their results (`functools.cache`, `lru_cache`), which no snapshot holds
Cached: Any = type(functools.cache(int))
#: types of results that may depend on more than the arguments, as of a function that draws random numbers
_RESULTS = (Tensor, np.ndarray, np.generic, float)


def describe_cache(cached: Any) -> str:
    """Describe a cached function by the number of its results, if these are numbers."""
    kept = gc.get_referents(cached)  # Python shows them to its collector alone
    results = [item for one in kept for item in (one.values() if type(one) is dict else [one])]
    number = cached.cache_info().misses if any(isinstance(result, _RESULTS) for result in results) else 0
    return f"{number} results cached"


def is_users_cache(value: Any) -> bool:
    """Return whether `value` is a cached function of the user's."""
    code = getattr(value.__wrapped__, "__code__", None) if isinstance(value, Cached) else None
    return code is not None and is_user_file(code.co_filename)
