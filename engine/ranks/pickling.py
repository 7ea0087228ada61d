"""What keeps something from being pickled, by its path: `module.transform.fn`, not "can't pickle lambda"."""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from midstride.engine.modules.torch_internals import children_of

__all__ = ["find_unpicklable"]


def find_unpicklable(value: Any, path: str) -> str | None:
    """Return the innermost part of `value` that cannot be pickled, by its path, and why; None if all of it can.

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
        inner = (_innermost(item, f"{path}{key}", seen) for key, item in _items(value))
        return next(filter(None, inner), f"{path}: {error}")
    return None


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """What is directly in `value`, and how it is reached."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        if isinstance(value, nn.Module):
            yield from ((f".{name}", child) for name, child in children_of(value).items())
        yield from ((f".{name}", item) for name, item in vars(value).items() if name != "_modules")
