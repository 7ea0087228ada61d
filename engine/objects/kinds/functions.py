"""Functions with their closures, methods, partials and weak references."""

import functools
import gc
import types
import weakref
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
from midstride.engine.state.object_nodes import Instance, kind_name, kind_text, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = [
    "Cached",
    "Functions",
    "Methods",
    "Partials",
    "WeakReferences",
    "code_digest",
    "describe_cache",
    "digest_of_code",
    "is_users_cache",
]


class Functions(Kind):
    """Functions: this attempt's code, with a snapshot's closures, changed defaults, attributes."""

    form = "function"
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

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill the values in the closure of the live function, or of one of that name, in place."""
        code = node.state.get("code")
        is_same = isinstance(live, types.FunctionType) and kind_text(live.__module__, live.__qualname__) == node.kind
        if not is_same or (code is not None and code_digest(live) != code):
            found = restore.find_function(node.kind, code)
            if not is_same and not restore.use(found, path, fits=found is not None):
                return restore.mark_stale(path, node.kind, live)
            live = live if found is None else found
        if code is not None and code_digest(live) != code:  # the code was changed since the snapshot
            restore.read_back()
        restore.set(live, path)
        _restore_closure(restore, node, live, path)
        for name in node.state.keys() & {"__defaults__", "__kwdefaults__"}:
            before = getattr(live, name)
            after = restore.put(node.state[name], before, step(path, name))
            if after is not before:
                setattr(live, name, after)
        if "attributes" in node.state:
            restore.attributes(node.state["attributes"], live, path)
        return live


def _restore_closure(restore: "GraphRestore", node: Instance, live: types.FunctionType, path: str) -> None:
    cells = dict(zip(live.__code__.co_freevars, live.__closure__ or (), strict=True))
    for name, child in node.state.get("cells", {}).items():
        cell = cells.get(name, types.CellType())
        before = cell.cell_contents if cell != types.CellType() else MISSING
        after = restore.put(child, before, step(path, name))
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

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the method of the restored object."""
        is_method = isinstance(live, _METHODS)
        owner = restore.put(node.state["of"], live.__self__ if is_method else MISSING, step(path, "__self__"))
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

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill a partial in place."""
        kind = class_called(node.kind, live, partial) if node.kind != kind_name(partial) else partial
        fits = type(live) is kind
        before = {name: getattr(live, name) if fits else MISSING for name in ("func", "args", "keywords")}
        after = {name: restore.put(node.state[name], before[name], step(path, name)) for name in before}
        if kind is None or not callable(after["func"]):
            return restore.mark_stale(path, node.kind, live)
        if not restore.use(live, path, fits=fits):
            live = restore.set(partial.__new__(kind, after["func"], *after["args"], **after["keywords"]), path)
        else:
            live.__setstate__((after["func"], after["args"], after["keywords"], vars(live)))
        restore.attributes(node.state.get("attributes", {}), live, path)
        return live


class WeakReferences(Kind):
    """Weak references without a callback."""

    form = "weak"
    types = (weakref.ref,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of the object, which other references keep alive."""
        if value.__callback__ is not None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        target = value()
        return self.instance(value, **({} if target is None else {"of": walk.node(target, step(path, "of"))}))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return a reference to the restored object, or a dead one."""
        before = live() if type(live) is weakref.ref else None
        if "of" not in node.state:
            return live if type(live) is weakref.ref and before is None else restore.set(weakref.ref(_Gone()), path)
        after = restore.put(node.state["of"], MISSING if before is None else before, step(path, "of"))
        if after is MISSING:
            return restore.mark_stale(path, node.kind, live)
        try:
            return live if after is before else restore.set(weakref.ref(after), path)
        except TypeError:  # its class has no room for one
            return restore.mark_stale(path, node.kind, live)


class _Gone:
    """A weak reference to a new instance of this class is dead at once."""


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
