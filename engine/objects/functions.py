"""Restores functions, methods, partials and weak references."""

import types
import weakref
from functools import partial
from pathlib import PurePath
from typing import Any

from midstride.engine.objects.attribute_restore import class_called, fill_attributes
from midstride.engine.objects.containers import MISSING, Restore
from midstride.engine.objects.function_code import code_digest
from midstride.engine.objects.plain_values import kind_name, step
from midstride.engine.state.object_nodes import Instance, kind_text

__all__ = ["fill_function", "fill_method", "fill_partial", "fill_weak"]


def fill_function(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a function: its code is that of this attempt; values in its closure are filled in place."""
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
    cells = dict(zip(live.__code__.co_freevars, live.__closure__ or (), strict=True))
    for name, child in node.state.get("cells", {}).items():
        cell = cells.get(name, types.CellType())
        before = cell.cell_contents if cell != types.CellType() else MISSING
        after = restore.put(child, before, step(path, name))
        if after is not before and after is not MISSING:
            cell.cell_contents = after
    _fill_defaults(restore, node, live, path)
    return live


def _fill_defaults(restore: Restore, node: Instance, live: types.FunctionType, path: str) -> None:
    """Restore the defaults and the attributes of a function."""
    for name in node.state.keys() & {"__defaults__", "__kwdefaults__"}:
        before = getattr(live, name)
        after = restore.put(node.state[name], before, step(path, name))
        if after is not before:
            setattr(live, name, after)
    if "attributes" in node.state:
        fill_attributes(restore, node.state["attributes"], live, path)


def fill_method(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a bound method."""
    is_method = isinstance(live, (types.MethodType, types.BuiltinMethodType))
    owner = restore.put(node.state["of"], live.__self__ if is_method else MISSING, step(path, "__self__"))
    name = node.kind.rpartition(".")[2]
    if is_method and live.__name__ == name and live.__self__ is owner:
        return live
    # Not a method of a path: a damaged or hostile snapshot could name one that deletes files.
    method = None if isinstance(owner, PurePath) else getattr(owner, name, None)
    if not isinstance(method, (types.MethodType, types.BuiltinMethodType)) or method.__self__ is not owner:
        return restore.mark_stale(path, node.kind, live)
    return method


def fill_partial(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a partial, in place if there is one."""
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
    fill_attributes(restore, node.state.get("attributes", {}), live, path)
    return live


def fill_weak(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a weak reference."""
    before = live() if type(live) is weakref.ref else None
    if "of" not in node.state:  # nothing kept alive what it referred to
        return live if type(live) is weakref.ref and before is None else restore.set(weakref.ref(_Gone()), path)
    after = restore.put(node.state["of"], MISSING if before is None else before, step(path, "of"))
    if after is MISSING:
        return restore.mark_stale(path, node.kind, live)
    try:
        return live if after is before else restore.set(weakref.ref(after), path)
    except TypeError:  # of a class that has no room for one
        return restore.mark_stale(path, node.kind, live)


class _Gone:
    """A weak reference to a new instance of this class is dead at once."""
