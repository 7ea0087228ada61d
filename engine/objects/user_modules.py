"""User's modules: files that define classes of a training, and their imports."""

import dis
import sys
import types
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from midstride.engine.code_origin import is_user_class, is_user_module, module_of
from midstride.engine.objects.classes import keeps_attributes
from midstride.engine.state.object_nodes import kind_text

__all__ = ["function_called", "functions_of", "global_reads", "names_in", "texts_in", "user_modules"]

#: modules of libraries whose functions do nothing but compute: no file can do harm by naming one
_OF_TENSORS = frozenset(
    {"torch.nn.functional", "torch.optim.lr_scheduler", "torch.optim.swa_utils", "torchmetrics.utilities.data"}
)

_WRAPPERS = (classmethod, staticmethod, types.MethodType)


def user_modules(kinds: Iterable[type]) -> list[types.ModuleType]:
    """Return the user's modules that define `kinds`, and those they refer to, by name."""
    names = _reached(frozenset(module_of(kind) for kind in kinds), len(sys.modules))
    return [sys.modules[name] for name in names if name in sys.modules]


@lru_cache(maxsize=8)  # asked at every snapshot; what a module names is looked at anew where another was imported
def _reached(begin: frozenset[str], _modules: int) -> tuple[str, ...]:
    found: set[str] = set()
    queue = [*begin]
    while queue:
        name = queue.pop()
        if name not in found and name in sys.modules and is_user_module(name):
            found.add(name)
            queue += _named_by(sys.modules[name])
    return tuple(sorted(found))


def _named_by(module: types.ModuleType) -> Iterator[str]:
    """Yield possible names of modules that `module` refers to, by values, classes and code."""
    package = getattr(module, "__package__", None) or ""
    for value in [*vars(module).values()]:
        if isinstance(value, types.ModuleType):
            yield value.__name__
            continue
        owner: Any = value if isinstance(value, (type, types.FunctionType)) else type(value)
        yield str(owner.__module__)
        for function in functions_of(owner):
            for name in names_in(function.__code__):  # imported where it is called
                yield name
                yield f"{package}.{name}"


def functions_of(owner: Any) -> Iterator[types.FunctionType]:
    """Yield the user's functions in a class, or `owner` itself if it is one."""
    values = vars(owner).values() if isinstance(owner, type) and is_user_class(owner) else [owner]
    for value in values:
        # Asked by class: the value may be a library's stand-in that raises at any attribute.
        function = value.__func__ if isinstance(value, _WRAPPERS) else value
        if isinstance(function, types.FunctionType) and is_user_module(function.__module__):
            yield function


def function_called(kind: str) -> types.FunctionType | None:
    """Return the function called `kind`; None if none is loaded, or a snapshot must not name it.

    Snapshots name functions of the user's, functions on tensors, and methods of the library classes whose objects they
    make. They name no function that a user's module has merely imported: it could delete files.
    """
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    is_known = module in _OF_TENSORS or is_user_module(module)
    for inner in name.split("."):
        found = vars(found).get(inner) if isinstance(found, (type, types.ModuleType)) else None
        is_known = is_known or (isinstance(found, type) and keeps_attributes(found))
    found = getattr(found, "__func__", found)
    is_it = isinstance(found, types.FunctionType) and kind_text(found.__module__, found.__qualname__) == kind
    return found if is_it and is_known else None


def names_in(code: types.CodeType) -> list[str]:
    """Return globals, attributes and modules named by `code` and by functions in it."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += names_in(constant)
    return list(dict.fromkeys(names))


def texts_in(code: types.CodeType) -> Iterator[str]:
    """Yield the texts written in `code` and in functions in it, such as keys of items."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from texts_in(constant)
        elif isinstance(constant, str):
            yield constant


@lru_cache(maxsize=256)
def global_reads(code: types.CodeType) -> frozenset[str]:
    """Return the globals that `code` and the functions written in it name."""
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_reads(constant)
    return frozenset(found)
