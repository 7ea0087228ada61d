"""Finds the random number generators that an object uses when it is read, and seeds them."""

import inspect
import random
import sys
import types
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from midstride.engine.objects.attributes import attributes_of, items_of
from midstride.engine.objects.user_modules import names_in

__all__ = [
    "MAIN_GENERATORS",
    "Generator",
    "find_generators",
    "get_state",
    "is_generator",
    "path_to_module",
    "seeder",
    "set_state",
    "shared_generators",
    "used_by_hook",
]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: default generators of libraries: each is part of every snapshot
MAIN_GENERATORS = (torch.default_generator, np.random.mtrand._rand, random._inst)
_LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic, nn.Module, type, types.ModuleType)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_FOLLOWED = (*_GENERATORS, *_CONTAINERS, types.FunctionType)
#: items: containers within a longer container hold data, not transforms
_MANY = 256
#: largest number of items of one container that are searched
_LONG = 10_000
_DEEP = 8
#: in paths, marks values that an instance shares with others
_OUTSIDE = " ("
#: methods that reading an object calls; functions that they name are searched, too
_CALLED = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward")
_LIBRARIES = frozenset(
    {"numpy", "torch", "torchdata", "torchvision", "pandas", "pyarrow", "datasets", "PIL", "midstride"}
)


def is_generator(value: object) -> bool:
    """Return whether `value` is a random number generator; a cached `isinstance`."""
    kind: type = type(value)
    return _is_generator_class(kind)


@lru_cache(maxsize=1024)  # asked of each global at every snapshot; torch's class answers `isinstance` in Python
def _is_generator_class(kind: type) -> bool:
    return issubclass(kind, _GENERATORS)


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
    """Return the path at which reading `owner` uses `module` or a trained part of it; None if it does not."""
    parts = {id(part) for part in module.modules() if any(p.requires_grad for p in part.parameters())} | {id(module)}
    return next((path.removeprefix(".") for path, value in _used_by_reading(owner, set()) if id(value) in parts), None)


def _used_by_reading(owner: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield path and value of everything that reading `owner` uses; modules and generators are not searched."""
    queue: deque[tuple[str, object, int]] = deque([("", owner, 0)])
    while queue:
        path, value, depth = queue.popleft()
        is_module = isinstance(value, nn.Module)
        if id(value) in seen or value is None or (isinstance(value, (*_LEAVES, random.SystemRandom)) and not is_module):
            continue
        seen.add(id(value))
        yield path, value
        if depth < _DEEP and not is_module and not _is_generator(value):
            queue += [(f"{path}{step}", item, depth + 1) for step, item in _items(value)]


def _is_generator(value: object) -> bool:
    return isinstance(value, _GENERATORS) or callable(getattr(type(value), "reseed", None))


def shared_generators(owner: object) -> list[Any]:
    """Return the generators that copies of `owner` share with it: in globals, class attributes and closures."""
    return [generator for path, generator in sorted(find_generators(owner).items()) if _OUTSIDE in path]


def used_by_hook(owner: object) -> Iterator[object]:
    """Yield what `owner`, which has a method `reseed(seed)`, uses when it is read, except default generators."""
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
    """Return the items of a long container that may be or hold generators: all but containers, which hold data."""
    kinds = {*map(type, value.values() if isinstance(value, dict) else value)}
    looked_at = tuple(kind for kind in kinds if not issubclass(kind, (*_LEAVES, *_CONTAINERS)))
    found = ((key, item) for key, item in items if isinstance(item, looked_at)) if looked_at else iter(())
    return islice(found, _LONG)


def _used_by_class(kind: type) -> Iterator[tuple[str, object]]:
    """Yield class attributes, and what the functions that reading an instance calls use."""
    if _is_library(kind.__module__):
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
        elif isinstance(used, _FOLLOWED) or not _is_library(type(used).__module__):
            yield f" (global {name})", used


def _called_on(kind: type, names: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Yield the attributes of `kind` in `names`, and what constructing and calling an instance uses."""
    if _is_library(kind.__module__):
        return
    for name in {*names, "__init__", *_CALLED}:
        value = _static(kind, name)
        value = getattr(value, "__func__", value)
        if value is not None and not isinstance(value, types.WrapperDescriptorType):
            yield f".{name}", value


def _static(kind: type, name: str) -> Any:
    """Return the unbound attribute `name` of `kind`, or None; ten times as fast as `inspect.getattr_static`."""
    if type(kind) in (type, ABCMeta):  # whose own attributes are no generators
        return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return inspect.getattr_static(kind, name, None)


@cache
def _is_library(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in sys.stdlib_module_names or top in _LIBRARIES


def seeder(generator: Any) -> Callable[[int], object]:
    """Return a function that seeds `generator` by a 64-bit number."""
    if isinstance(generator, torch.Generator):
        return generator.manual_seed
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed >> 32)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(generator, random.Random):
        return generator.seed
    reseed: Callable[[int], Any] = generator.reseed
    return reseed


def get_state(generator: Any) -> Any:
    """Return the state of `generator`, in types that snapshots hold."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Restore the state of `generator`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
