"""What user code keeps beside objects: on its classes, in globals of its files, in its functions."""

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from midstride.engine.code_origin import is_user_class, is_user_file

__all__ = ["class_and_global_state", "is_data"]

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_WRAPPERS = (classmethod, staticmethod, property, functools.cached_property)
#: of a class, the descriptors that Python makes for slots and the like
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)


def class_and_global_state(objects: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Yield by name what the user's code around `objects` holds.

    That is what stands on their classes and in the globals of the files of these, on the user's other classes that such
    a file names, and in the defaults, attributes and closures of functions there.
    """
    kinds = {kind for value in objects for kind in type(value).__mro__ if is_user_class(kind)}
    files = sorted({kind.__module__ for kind in kinds if kind.__module__ in sys.modules})
    named = [value for file in files for value in vars(sys.modules[file]).values()]
    kinds.update(value for value in named if isinstance(value, type) and is_user_class(value))
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield from _of_class(kind)
    for function in dict.fromkeys(value for value in named if isinstance(value, types.FunctionType)):
        yield from _of_function(function)
    for file in files:
        for name, value in vars(sys.modules[file]).items():
            if not name.startswith("_") and is_data(value):
                yield f"global {file}.{name}", value


def is_data(value: object) -> bool:
    """Return whether `value` is data rather than code: what can be called is, where its class is the user's."""
    if isinstance(value, (*_CODE, *_WRAPPERS, *_SLOTS)):
        return False
    return is_user_class(type(value)) or not callable(value)


def _of_class(kind: type) -> Iterator[tuple[str, object]]:
    name = f"class {kind.__qualname__}"
    if issubclass(kind, Enum):
        yield from ((f"{name}: {member.name}", member) for member in kind)
        return
    for key, value in vars(kind).items():
        code: Any = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(code, types.FunctionType):
            yield from _of_function(code)
        elif not key.startswith("__") and is_data(value):
            yield f"{name}: {key}", value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if not is_user_file(function.__code__.co_filename):
        return
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    held = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    held |= {**(function.__kwdefaults__ or {}), **vars(function)}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    for name, value in held.items():
        if is_data(value):
            yield f"function {function.__qualname__}: {name}", value
