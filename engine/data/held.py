"""Generators that an object holds: found where a reader of its code would find them, seeded like the main ones."""

import random
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Generator", "get_state", "held_generators", "seeder", "set_state"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic, nn.Module, type, types.ModuleType)
#: a longer container holds data, not transforms
_MANY = 256
_DEEP = 8
_CALLED = ("__getitem__", "__getitems__", "__call__", "forward")


def held_generators(owner: object, *, beside: object = None) -> dict[str, Any]:
    """Return the generators that `owner` uses when it is read, by their paths in it.

    Looked through: attributes, containers, wrapped data sets, transforms, and of functions the closure, the
    defaults and the globals they name. What has a method `reseed(seed)` speaks for itself and is in the result
    in place of what it holds. The main generators of torch, numpy and `random` are not, nor what `beside` holds.
    """
    found: dict[str, Any] = {}
    seen = {id(beside)}
    seen |= {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}
    queue: list[tuple[str, object, int]] = [("", owner, 0)]
    while queue:
        path, value, depth = queue.pop(0)
        if id(value) in seen or isinstance(value, (*_LEAVES, random.SystemRandom)) or value is None:
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS) or callable(getattr(value, "reseed", None)):
            found[path.removeprefix(".") or type(value).__name__] = value
        elif depth < _DEEP:
            queue += [(f"{path}{step}", part, depth + 1) for step, part in _parts(value)]
    return found


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        if len(value) <= _MANY:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"[{key!r}]", part) for key, part in items)
    elif isinstance(value, types.FunctionType):
        yield from _used_by(value)
    elif isinstance(value, (types.MethodType, partial)):
        names = ("__self__", "__func__") if isinstance(value, types.MethodType) else ("func", "args", "keywords")
        yield from ((f".{name}", getattr(value, name)) for name in names)
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
        for name in _CALLED:
            if isinstance(function := getattr(type(value), name, None), types.FunctionType):
                yield f".{name}", function


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if function.__module__.partition(".")[0] in ("torch", "torchvision", "numpy"):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" (its {name})", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield " (its defaults)", (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name in function.__code__.co_names:
        if isinstance(part := function.__globals__.get(name), (*_GENERATORS, types.FunctionType)):
            yield f" (global {name})", part


def seeder(generator: Any) -> Callable[[int], object]:
    """Return what seeds `generator` from a 64-bit hash."""
    if isinstance(generator, torch.Generator):
        return generator.manual_seed
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed >> 32)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(generator, random.Random):
        return generator.seed
    return generator.reseed  # type: ignore[no-any-return]


def get_state(generator: Any) -> Any:
    """Return the state of `generator`, of types that a snapshot holds."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Put `generator` back."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
