"""State that user code keeps outside objects: on its classes, in globals of its modules, in its functions."""

import functools
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from midstride.engine.code_origin import is_user_class, is_user_file
from midstride.engine.objects.function_cache import Cached, is_users_cache
from midstride.engine.objects.generator_search import Generator
from midstride.engine.objects.user_modules import user_modules

__all__ = ["class_and_global_state", "is_code", "is_counted_in", "is_data"]

#: modules of classes that user code uses as counters and containers
_COUNTED_IN = frozenset(
    {
        *("builtins", "collections", "itertools", "weakref", "_contextvars", "array", "ctypes", "queue", "_queue"),
        *("functools", "threading", "_thread", "multiprocessing.sharedctypes", "decimal", "fractions", "datetime"),
        *("numpy", "torch", "torch.nn.parameter", "pandas", "pandas.core.frame", "pandas.core.series"),
    }
)

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_WRAPPERS = (classmethod, staticmethod, property, functools.cached_property)
#: descriptors that Python makes in a class, such as those of slots
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)


def class_and_global_state(objects: Iterable[object], classes: Iterable[type] = ()) -> Iterator[tuple[str, object]]:
    """Yield, with their names, the values that the user's code around `objects` and `classes` holds.

    These are attributes of their classes; and in the user's modules that these classes and their code name: globals
    (functions included), attributes of classes, and defaults, attributes, closures and caches of functions.
    """
    kinds = {kind for one in (*map(type, objects), *classes) for kind in one.__mro__ if is_user_class(kind)}
    modules = user_modules(kinds)
    named = [value for module in modules for value in vars(module).values()]
    kinds.update(value for value in named if isinstance(value, type) and is_user_class(value))
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield from _of_class(kind)
    for function in dict.fromkeys(code for code in map(_code_of, named) if isinstance(code, types.FunctionType)):
        yield from _of_function(function)
    for module in modules:
        for name, value in vars(module).items():
            is_function = isinstance(value, types.FunctionType) or is_users_cache(value)
            if not name.startswith("__") and (is_function or is_data(value) or _is_alias(name, value)):
                yield f"global {module.__name__}.{name}", value


def is_counted_in(value: object) -> bool:
    """Return whether `value` is of a class of Python or a library that user code keeps counts and the like in."""
    return type(value).__module__ in _COUNTED_IN and not isinstance(value, Generator)


def is_code(value: object) -> bool:
    """Return whether `value` is code: a function, a class, a module, or a descriptor such as a property."""
    return isinstance(value, (*_CODE, *_WRAPPERS, *_SLOTS))


def is_data(value: object) -> bool:
    """Return whether `value` is data rather than code; a callable object is data if its class is the user's."""
    return not is_code(value) and (is_user_class(type(value)) or not callable(value))


def _is_alias(name: str, value: object) -> bool:
    """Return whether `name` is an alias for a class or a C function, which code may set to another one later."""
    return isinstance(value, (type, types.BuiltinFunctionType)) and value.__name__ != name


def _of_class(kind: type) -> Iterator[tuple[str, object]]:
    name = f"class {kind.__qualname__}"
    if issubclass(kind, Enum):
        yield from ((f"{name}: {member.name}", member) for member in kind)
        return
    for key, value in vars(kind).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, types.FunctionType) or is_users_cache(function):
            yield f"{name}: {key}", function
            yield from _of_function(_code_of(function))
        elif not key.startswith("__") and (is_data(value) or _is_alias(key, value)):
            yield f"{name}: {key}", value


def _code_of(value: Any) -> Any:
    return value.__wrapped__ if isinstance(value, Cached) else value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if not is_user_file(function.__code__.co_filename):
        return
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values |= {**(function.__kwdefaults__ or {}), **vars(function)}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    values |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    yield f"function {function.__qualname__}", function
    for name, value in values.items():
        if is_data(value):
            yield f"function {function.__qualname__}: {name}", value
