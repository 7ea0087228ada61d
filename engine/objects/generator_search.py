"""Finds generators that an object uses as it is read, also behind `reseed(seed)`."""

import inspect
import multiprocessing.sharedctypes
import random
import sys
import types
from abc import ABCMeta
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from midstride.engine.code_origin import module_of
from midstride.engine.objects.attributes import attributes_of, delete_attribute, items_of, own_dict, set_attribute
from midstride.engine.objects.kinds.generators import MAIN_GENERATORS, Generator, get_state, set_state
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.user_modules import names_in

__all__ = [
    "ReseedHook",
    "find_generators",
    "held_objects",
    "held_of",
    "is_inside",
    "path_to_module",
    "restorable",
    "shared_generators",
    "shared_memory",
    "shared_with_module",
    "used_by_hook",
]

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic, nn.Module, type, types.ModuleType)
_NOT_FOLLOWED = (*_LEAVES, random.SystemRandom)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_FOLLOWED = (*_GENERATORS, *_CONTAINERS, types.FunctionType)
#: items: containers within a longer container hold data, not transforms
_MANY = 256
#: largest number of items of one container that are searched
_LONG = 10_000
_DEEP = 8
#: in paths, marks values that an instance shares with others
_OUTSIDE = " ("
_CLOSED_OVER = " (its "  #: in paths, marks values of closures
_PASSES = "torch.utils.data.dataloader"  #: module of the iterators of torch's loaders
#: methods that reading an object calls; functions that they name are searched, too
_CALLED = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward")
_LIBRARIES = frozenset(
    {"numpy", "torch", "torchdata", "torchvision", "pandas", "pyarrow", "datasets", "PIL", "midstride"}
)


def find_generators(owner: object, *, beside: object = None) -> dict[str, Any]:
    """Return the generators that `owner` uses when it is read, by their paths in it.

    Searched are attributes (of classes and in slots, too), containers, wrapped data sets and transforms; and, of the
    functions and methods that reading calls, closures, defaults and the globals they name. An object with a method
    `reseed(seed)` is returned in place of the generators that it holds. The default generators of torch, numpy and
    `random` are left out, and those that `beside` uses.
    """
    found: dict[str, Any] = {}
    for path, value in _used_by_reading(owner, {id(beside), *map(id, MAIN_GENERATORS)}):
        if _is_generator(value) and not isinstance(value, nn.Module):
            found[path.removeprefix(".") or type(value).__name__] = value
    return found


def path_to_module(owner: object, module: nn.Module) -> str | None:
    """Return the path at which reading `owner` uses `module` or a trained part, if any."""
    parts = {id(part) for part in module.modules() if any(p.requires_grad for p in part.parameters())} | {id(module)}
    return next((path.removeprefix(".") for path, value in _used_by_reading(owner, set()) if id(value) in parts), None)


def held_objects(owner: object) -> dict[str, object]:
    """Return the objects with attributes that `owner` refers to, itself included, by path.

    Passes of torch's loaders, and values of globals and classes are left out.
    """
    used = list(_used_by_reading(owner, set()))
    passes = [path for path, value in used if type(value).__module__ == _PASSES and hasattr(type(value), "__next__")]
    own = ((path.replace(_CLOSED_OVER, "."), path, value) for path, value in used if own_dict(value))
    return {path: value for own_path, path, value in own if not (_OUTSIDE in own_path or is_inside(path, passes))}


def is_inside(path: str, owners: Iterable[str]) -> bool:
    """Return whether `path` is one of `owners`, or of an object in one."""
    return any(path == one or path.startswith((f"{one}.", f"{one}[", f"{one} (")) for one in owners)


def held_of(owner: object, kind: type) -> dict[str, Any]:
    """Return the objects of `kind` that reading `owner` uses, by path."""
    return {path: value for path, value in _used_by_reading(owner, set()) if isinstance(value, kind)}


def shared_memory(owner: object) -> dict[str, object]:
    """Return shared values of `multiprocessing` that reading `owner` uses, by path."""
    return held_of(owner, multiprocessing.sharedctypes.SynchronizedBase)


def shared_with_module(owner: object, module: nn.Module) -> dict[str, object]:
    """Return objects, by path, that reading `owner` uses and attributes of `module` hold."""
    known = {id(part) for part in module.modules()}
    held = {
        id(value)
        for part in module.modules()
        for name, attribute in vars(part).items()
        if not name.startswith("_") and id(attribute) not in known
        for _, value in _used_by_reading(attribute, set(known))
    }
    used = ((path, value) for path, value in _used_by_reading(owner, set()) if id(value) in held and value is not owner)
    return {path.removeprefix("."): value for path, value in used if _is_mutable(value)}


def _is_mutable(value: object) -> bool:
    is_code = isinstance(value, (types.FunctionType, types.MethodType, partial, *_GENERATORS, tuple, frozenset))
    return not is_code and (isinstance(value, _CONTAINERS) or not _is_library(module_of(type(value))))


def _used_by_reading(owner: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield path and value of everything used by reading `owner`.

    Modules and generators are not searched.
    """
    queue: deque[tuple[str, object, int]] = deque([("", owner, 0)])
    while queue:
        path, value, depth = queue.popleft()
        is_module = isinstance(value, nn.Module)
        if id(value) in seen or value is None or (isinstance(value, _NOT_FOLLOWED) and not is_module):
            continue
        seen.add(id(value))
        yield path, value
        if depth < _DEEP and not is_module and not _is_generator(value):
            queue += [(f"{path}{step}", item, depth + 1) for step, item in _items(value)]


def _is_generator(value: object) -> bool:
    return isinstance(value, _GENERATORS) or callable(getattr(type(value), "reseed", None))


def shared_generators(owner: object) -> list[Any]:
    """Return generators shared by `owner` and its copies: in globals, classes and closures."""
    return [generator for path, generator in sorted(find_generators(owner).items()) if _OUTSIDE in path]


def used_by_hook(owner: object) -> Iterator[object]:
    """Yield what `owner` with a `reseed(seed)` uses as it is read, except default generators."""
    seen = {id(owner), *map(id, MAIN_GENERATORS)}
    for _, item in _items(owner):
        yield from (value for _, value in _used_by_reading(item, seen))


def _items(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, _CONTAINERS):
        items = items_of(value) or ()
        if len(value) > _MANY:
            items = _unlike_data(value, items)
        yield from ((f"[{key!r}]", item) for key, item in items)
    elif isinstance(value, types.FunctionType):
        yield from _used_by(value)
    elif isinstance(value, (types.MethodType, partial)):
        names = ("__self__", "__func__") if isinstance(value, types.MethodType) else ("func", "args", "keywords")
        yield from ((f".{name}", getattr(value, name)) for name in names)
    else:
        yield from ((f".{name}", item) for name, item in attributes_of(value).items())
        yield from _used_by_class(type(value))


def _unlike_data(value: Collection[Any], items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    """Return the items of a long container that may be or hold generators, unlike containers."""
    kinds = {*map(type, value.values() if isinstance(value, dict) else value)}
    looked_at = tuple(kind for kind in kinds if not issubclass(kind, (*_LEAVES, *_CONTAINERS)))
    found = ((key, item) for key, item in items if isinstance(item, looked_at)) if looked_at else iter(())
    return islice(found, _LONG)


def _used_by_class(kind: type) -> Iterator[tuple[str, object]]:
    """Yield class attributes, and what the functions that reading an instance calls use."""
    if _is_library(module_of(kind)):
        return
    names = [name for name in _CALLED if isinstance(_static(kind, name), types.FunctionType)]
    for name in names:  # grows by what they call in turn
        function = _static(kind, name)
        function = getattr(function, "__func__", function)
        if isinstance(function, property):
            function = function.fget
        if isinstance(function, types.FunctionType):
            yield f".{name}", function
            names += [other for other in names_in(function.__code__) if other not in names]
        elif function is not None:
            yield f" (class attribute {name})", function


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if _is_library(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" (its {name})", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield " (its defaults)", (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    names = names_in(function.__code__)
    for name in names:
        used = function.__globals__.get(name)
        if isinstance(used, types.ModuleType) and not _is_library(used.__name__):
            inner = ((f"{name}.{other}", vars(used).get(other)) for other in names)
            yield from ((f" (global {path})", value) for path, value in inner if value is not None)
        elif isinstance(used, type):
            yield from ((f" (global {name}){path}", value) for path, value in _called_on(used, names))
        elif isinstance(used, _FOLLOWED) or not _is_library(module_of(type(used))):
            yield f" (global {name})", used


def _called_on(kind: type, names: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Yield attributes `names` of `kind`, and what making and calling an instance uses."""
    if _is_library(module_of(kind)):
        return
    for name in {*names, "__init__", *_CALLED}:
        value = _static(kind, name)
        value = getattr(value, "__func__", value)
        if value is not None and not isinstance(value, types.WrapperDescriptorType):
            yield f".{name}", value


def _static(kind: type, name: str) -> Any:
    """Return the unbound attribute `name` of `kind`, or None.

    Ten times as fast as `inspect.getattr_static`.
    """
    for base in kind.__mro__:
        if name in vars(base):
            return vars(base)[name]
    # Attributes of the usual metaclasses are no generators.
    return None if type(kind) in (type, ABCMeta) else inspect.getattr_static(kind, name, None)


@cache
def _is_library(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in sys.stdlib_module_names or top in _LIBRARIES


def restorable(generators: list[Any]) -> list[Any]:
    """Return `generators`, with `ReseedHook` around objects that have `reseed(seed)`."""
    return [one if isinstance(one, Generator) else ReseedHook(one) for one in generators]


class ReseedHook:
    """Wraps an object with a method `reseed(seed)` as a generator: `getstate` and `setstate`.

    The state consists of the states of the generators that it uses, and the attributes that `reseed` sets.

    Args:
        owner: the object; its `reseed` is called once to find what it sets, and the changes are reverted.
    """

    def __init__(self, owner: Any) -> None:
        used = [owner, *used_by_hook(owner)]
        self._generators = [value for value in used if isinstance(value, Generator)]
        self._attributes: list[tuple[Any, str]] = []
        holders = [value for value in used if not isinstance(value, Generator)]
        moved = [*MAIN_GENERATORS, *self._generators]
        states, before = [*map(get_state, moved)], [*map(attributes_of, holders)]
        with suppress(Exception):  # reading calls it, and says where it failed
            owner.reseed(0)
        for holder, own in zip(holders, before, strict=True):
            for name, value in attributes_of(holder).items():
                if value is not own.get(name, MISSING):
                    self._attributes.append((holder, name))
                    _set(holder, name, own.get(name, MISSING))
        for generator, state in zip(moved, states, strict=True):
            set_state(generator, state)

    def getstate(self) -> tuple[list[Any], list[Any]]:
        """Return the values of the attributes, uncopied, and the states of the generators."""
        values = [attributes_of(holder).get(name, MISSING) for holder, name in self._attributes]
        return values, [*map(get_state, self._generators)]

    def setstate(self, state: tuple[list[Any], list[Any]]) -> None:
        """Set attributes and generators to what `getstate` returned."""
        for (holder, name), value in zip(self._attributes, state[0], strict=True):
            _set(holder, name, value)
        for generator, own in zip(self._generators, state[1], strict=True):
            set_state(generator, own)


def _set(holder: Any, name: str, value: Any) -> None:
    if value is not MISSING:
        set_attribute(holder, name, value)
    elif name in attributes_of(holder):
        delete_attribute(holder, name)
