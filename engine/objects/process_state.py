"""State of the process that user code sets: settings of torch, environment variables, functions of libraries."""

import linecache
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
import xxhash

from midstride.engine.code_origin import is_user_module
from midstride.engine.objects.user_modules import user_modules

__all__ = ["process_state"]

#: settings of torch that change the bits of a training
_SETTINGS: tuple[Callable[[], object], ...] = (
    torch.get_default_dtype,
    torch.get_default_device,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
)


def process_state(classes: Iterable[type]) -> Iterator[tuple[str, object]]:
    """Yield settings by name; environment variables and functions only if user code around `classes` names them."""
    for setting in _SETTINGS:
        yield f"torch.{setting.__name__}()", str(setting())
    modules = user_modules(classes)
    sources = ["".join(linecache.getlines(getattr(module, "__file__", None) or "")) for module in modules]
    for name, value in os.environ.items():
        if any(name in source for source in sources):  # libraries set others, which no training step reads
            yield f"environment variable {name}", xxhash.xxh3_64_hexdigest(value.encode(errors="surrogateescape"))[:6]
    functions = (_functions_of_libraries(*of) for of in zip(modules, sources, strict=True))
    yield from {name: function for found in functions for name, function in found}.items()


def _functions_of_libraries(module: types.ModuleType, source: str) -> Iterator[tuple[str, object]]:
    """Yield the functions of libraries that `source` of `module` names, as `F.relu`: user code may replace them."""
    libraries = tuple(
        name
        for name, value in vars(module).items()
        if isinstance(value, types.ModuleType) and not is_user_module(value.__name__)
    )
    for path in _paths(source, libraries):
        library: Any = module
        found: Any = module
        for name in path.split("."):
            library, found = found, vars(found).get(name) if isinstance(found, types.ModuleType) else None
        if isinstance(found, types.BuiltinFunctionType | types.FunctionType):
            kind = found if isinstance(found, types.FunctionType) else found.__qualname__
            yield f"library function {library.__name__}.{path.rpartition('.')[2]}", kind


@lru_cache(maxsize=256)  # asked at many snapshots
def _paths(source: str, names: tuple[str, ...]) -> list[str]:
    """Return the dotted paths in `source` that begin with one of `names`, such as `F.relu`."""
    return sorted(set(re.findall(rf"\b(?:{'|'.join(names)})(?:\.\w+)+", source))) if names else []
