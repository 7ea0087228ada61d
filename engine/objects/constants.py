"""Constants that the user's code reads in training, such as globals and class attributes."""

import argparse
import dataclasses
import functools
import os
import time
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from midstride.engine.code_origin import is_user_class, is_user_file, is_user_module
from midstride.engine.formatting import format_names
from midstride.engine.objects.attributes import own_dict
from midstride.engine.objects.kinds.functions import Cached
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.roots import CODE, function_values
from midstride.engine.objects.user_modules import global_reads, names_in, texts_in

__all__ = ["constant_changes", "constants_of", "is_of_clock"]

#: functions that build what is trained: the state, the settings and the samples of a run tell what they read
_BUILD = ("__init__", "__new__", "__post_init__", "prepare_data", "setup", "configure_", "teardown")
_BUILD_ENDS = ("_dataloader", "_dataloaders")
#: variables that launchers set anew for each attempt, such as ports
_OF_LAUNCHERS = ("MASTER_", "TORCHELASTIC_", "SLURM_", "HOROVOD_", "OMPI_", "PREFECT_", "MIDSTRIDE_")
#: types whose values are shown; of others, such as texts, which can be secrets, only a digest is kept
_SHOWN = (
    *(bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, np.generic),
    *(Enum, range, slice, Decimal, Fraction, timedelta),
)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_TENSORS = (Tensor, nn.Parameter)
#: types of objects whose values are compared, besides the user's classes
_COMPARED = (*_CONTAINERS, *_TENSORS, np.ndarray, argparse.Namespace, types.SimpleNamespace)
#: largest number of plain items that are compared, and of other items; of bytes of an array; of objects in one another
_ITEMS, _FEW, _BYTES, _DEEP = 10_000, 20, 1 << 16, 4


def constants_of(code: Iterable[object], places: Callable[[], Container[int]]) -> dict[str, str]:
    """Return name -> text of the plain values that classes and functions of the user's read.

    These are globals, defaults, closures, environment variables, and attributes of classes and of settings' objects.

    Args:
        code: classes of the training, and functions whose closures are compared otherwise. What they call is followed.
        places: returns the addresses of objects that snapshots hold, which are no constants.
    """
    reached = _Reached(code)
    held = functools.cache(places)
    found: dict[str, str] = {}
    for name, value in reached.values.items():
        found |= _texts(name, value, reached.terms, lambda one: id(one) in held())
    for name in reached.terms & os.environ.keys():
        if name.startswith(_OF_LAUNCHERS):
            continue
        found[f"environment variable {name}"] = _digest(os.environ[name])
    return found


def constant_changes(saved: Mapping[str, str], running: Mapping[str, str]) -> list[str]:
    """Return a warning on constants that have changed since the snapshot, or [].

    Constants that only one of them has are ignored: the code that reads them has changed as well.
    """
    changed = [name for name, text in running.items() if saved.get(name, text) != text]
    if not changed:
        return []
    told = format_names([f"{name} (was {saved[name]}, is {running[name]})" for name in changed])
    return [
        f"the code reads other values than when the snapshot was taken: {told}. The run continues with the new ones. "
        "If this is not intended, restore the old ones, or start another run"
    ]


def is_of_clock(value: float) -> bool:
    """Return whether `value` is a reading of a clock, which differs between attempts."""
    return any(
        0 <= clock() - value < 86_400 and value > 100 for clock in (time.time, time.perf_counter, time.monotonic)
    )


class _Reached:
    """The code that some classes and functions call, and the values that it names.

    Args:
        code: classes, and functions whose closures are no matter of ours.
    """

    def __init__(self, code: Iterable[object]) -> None:
        #: names of attributes and texts in the code: it reads no other attribute or item by name
        self.terms: set[str] = set()
        self.values: dict[str, object] = {}
        self._seen: set[object] = set()
        self._classes: list[type] = []
        self._queue = [*code]
        self._held = {one for one in self._queue if isinstance(one, types.FunctionType)}
        while self._queue:
            self._visit(self._queue.pop())
        for kind in self._classes:
            for name in self.terms & vars(kind).keys():
                self._meet(f"class {kind.__qualname__}: {name}", vars(kind)[name], ())

    def _visit(self, one: object) -> None:
        if isinstance(one, type):
            for kind in one.__mro__:
                if is_user_class(kind) and kind not in self._seen:
                    self._seen.add(kind)
                    self._classes.append(kind)
                    held = [value for name, value in vars(kind).items() if not _builds(name)]
                    self._queue += [value if _is_called(value) else type(value) for value in held]
            return
        function = _function_in(one)
        if isinstance(function, functools.partial):
            self._queue.append(function.func)
        elif isinstance(function, types.FunctionType) and function not in self._seen:
            self._seen.add(function)
            if is_user_file(function.__code__.co_filename):
                self._read(function)
            else:  # a decorator of a library, which calls the user's function
                self._queue += [value for value in function_values(function).values() if _is_called(value)]

    def _read(self, function: types.FunctionType) -> None:
        code = function.__code__
        names = names_in(code)
        self.terms |= {*names, *texts_in(code)}
        for name in sorted(global_reads(code) & function.__globals__.keys()):
            self._meet(f"global {function.__module__}.{name}", function.__globals__[name], names)
        held = {} if function in self._held else function_values(function)
        for name, value in held.items():
            self._meet(f"function {function.__qualname__}: {name}", value, names)

    def _meet(self, name: str, value: Any, names: Collection[str]) -> None:
        """Follow code; note other values.

        Args:
            name: of the value.
            value: what code names.
            names: names that this code uses; of a module, only values with one of them count.
        """
        kind = type(value)  # not the class that a proxy pretends to have
        if issubclass(kind, types.ModuleType):
            own = vars(value) if is_user_module(value.__name__) else {}
            for inner in sorted(own.keys() & {*names}):
                if not isinstance(own[inner], types.ModuleType):
                    self._meet(f"global {value.__name__}.{inner}", own[inner], ())
        elif issubclass(kind, functools.partial):
            self._queue.append(value.func)
            self.values |= {f"{name}: argument {key}": one for key, one in enumerate(value.args)}
            self.values |= {f"{name}: argument {key}": one for key, one in value.keywords.items()}
        elif _is_called(value):
            self._queue.append(value)
        else:
            self.values[name] = value
            if is_user_class(kind):
                self._queue.append(kind)


def _builds(name: str) -> bool:
    return name.startswith(_BUILD) or name.endswith(_BUILD_ENDS)


def _is_called(value: object) -> bool:
    kind = type(value)  # not the class that a proxy pretends to have
    return issubclass(kind, (*CODE, Cached, functools.partial))


def _function_in(one: Any) -> Any:
    """Return the function of a method, property or cache, or `one` itself."""
    if isinstance(one, (classmethod, staticmethod, types.MethodType)):
        return one.__func__
    if isinstance(one, property):
        return one.fget
    if isinstance(one, functools.cached_property):
        return one.func
    return one.__wrapped__ if isinstance(one, Cached) else one


def _texts(
    name: str, value: Any, terms: Collection[str], is_held: Callable[[object], bool], deep: int = _DEEP
) -> Iterator[tuple[str, str]]:
    """Yield names and texts of a plain value, or of the plain values that an object holds.

    Args:
        name: of the value.
        value: the value.
        terms: attributes and items with other names are not read.
        is_held: whether an object is part of snapshots.
        deep: number of objects in one another that are followed.
    """
    if (text := _text(value, terms, is_held)) is not None:
        yield from [(name, text)] if text else []
    elif deep:
        for inner, one in _parts(value, terms):
            yield from _texts(f"{name}{inner}", one, terms, is_held, deep - 1)


def _text(value: Any, terms: Collection[str], is_held: Callable[[object], bool]) -> str | None:
    """Return text of a plain value or container, "" if it is no constant; None of others."""
    kind = type(value)  # not the class that a proxy pretends to have
    if issubclass(kind, _SHOWN):
        return "" if kind is float and is_of_clock(value) else str(value)
    if issubclass(kind, (str, bytes)):
        return "" if kind is str and os.sep in value else _digest(repr(value))  # a path tells where, not what
    if not (issubclass(kind, _COMPARED) or _is_users(kind)) or is_held(value):
        return ""
    return _array_text(value) if issubclass(kind, (Tensor, np.ndarray)) else _text_of_items(value, terms)


def _text_of_items(value: Any, terms: Collection[str]) -> str | None:
    """Return one text of a container of plain values that is read as a whole; None of others."""
    kind = type(value)
    if not issubclass(kind, _CONTAINERS) or len(value) > _ITEMS or _named(value, terms):
        return None
    items = [*dict.items(value)] if issubclass(kind, dict) else [(None, one) for one in value]
    if not all(type(one) in PLAIN and type(key) in PLAIN for key, one in items):
        return None
    text = repr(items if issubclass(kind, (list, tuple)) else sorted(items, key=repr))
    is_shown = len(items) <= _FEW and not any(isinstance(one, str) for one in chain(*items))
    return repr(value) if is_shown else _digest(text)


def _named(value: Any, terms: Collection[str]) -> list[str]:
    """Return the keys of a dict that the code names."""
    return [key for key in value if isinstance(key, str) and key in terms] if issubclass(type(value), dict) else []


def _parts(value: Any, terms: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield steps and values of the items or attributes of `value` that the code can read."""
    kind = type(value)
    if issubclass(kind, (list, tuple)):
        yield from ((f"[{number}]", one) for number, one in enumerate(value[:_FEW]))
    elif issubclass(kind, dict):
        yield from ((f"[{key!r}]", dict.get(value, key)) for key in _named(value, terms) or [*value][:_FEW])
    elif not issubclass(kind, _CONTAINERS):
        yield from ((f".{key}", one) for key, one in own_dict(value).items() if key in terms)


def _is_users(kind: type) -> bool:
    return (is_user_class(kind) or dataclasses.is_dataclass(kind)) and not issubclass(kind, nn.Module)


def _array_text(value: Any) -> str:
    """Return a digest of a small array of numbers in memory; "" of others."""
    if isinstance(value, np.ndarray):
        is_plain = value.dtype.kind in "biufc"
    else:
        is_plain = type(value) in _TENSORS and value.layout == torch.strided and not value.is_quantized
    if not is_plain or value.nbytes > _BYTES or str(getattr(value, "device", "cpu")) != "cpu":
        return ""
    return f"{type(value).__name__} {_digest(repr((value.tolist(), str(value.dtype))))}"


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogateescape"))[:8]
