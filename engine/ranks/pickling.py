"""Finds the part of an object that cannot be pickled, by its path, such as `module.transform.fn`."""

import pickle
from collections.abc import Iterator
from typing import Any

from torch import nn

from midstride.engine.modules.torch_internals import children_of
from midstride.engine.objects.attributes import members_of

__all__ = ["find_unpicklable"]


def find_unpicklable(value: Any, path: str) -> str | None:
    """Return path and error of the innermost part of `value` that cannot be pickled; None if all of it can.

    >>> find_unpicklable({"rate": 0.1, "fn": lambda x: x}, "module.options").partition(":")[0]
    "module.options['fn']"
    """
    return _innermost(value, path, set())


def _innermost(value: Any, path: str, seen: set[int]) -> str | None:
    if id(value) in seen:
        return None
    seen.add(id(value))
    try:
        pickle.dumps(value)
    except Exception as error:
        inner = (_innermost(item, f"{path}{key}", seen) for key, item in _members(value))
        return next(filter(None, inner), f"{path}: {error}")
    return None


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes or items of `value`, each with the code that reaches it; submodules as `.name`."""
    if isinstance(value, nn.Module):
        yield from ((f".{name}", child) for name, child in children_of(value).items())
    if not isinstance(value, type):
        yield from (member for member in members_of(value) if member[0] != "._modules")
