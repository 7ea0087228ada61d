"""Plain values, which are written as they are or by a few arguments, and the size from which on they are data."""

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.state.object_nodes import Instance, kind_text
from midstride.engine.state.torch_internals import indices_and_values

__all__ = [
    "PLAIN",
    "VALUES",
    "is_large",
    "is_plain_key",
    "is_plain_value",
    "key_path",
    "kind_name",
    "step",
    "value_path",
]

#: types of immutable values that are written as they are
PLAIN = frozenset({type(None), bool, int, float, str, complex, bytes, torch.Size, torch.dtype, torch.device})
#: bytes; a larger value is data, which is watched but not written; `LARGE_SUM` is for all bytes in a container
LARGE_BYTES, LARGE_ITEMS, LARGE_SUM = 1 << 20, 1000, 16 << 20
_NUMBERS = frozenset({type(None), bool, int, float})
#: immutable class of the standard library -> function that returns the arguments to rebuild an instance
VALUES: dict[str, Callable[[Any], list[Any]]] = {
    "builtins:ellipsis": lambda value: [],
    "builtins:range": lambda value: [value.start, value.stop, value.step],
    "builtins:slice": lambda value: [value.start, value.stop, value.step],
    "decimal:Decimal": lambda value: [str(value)],
    "fractions:Fraction": lambda value: [value.numerator, value.denominator],
    "pathlib:PosixPath": lambda value: [str(value)],
    "pathlib:PurePosixPath": lambda value: [str(value)],
    "re:Pattern": lambda value: [value.pattern, value.flags],
    "datetime:timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime:date": lambda value: [value.year, value.month, value.day],
    "datetime:datetime": lambda value: [value.isoformat(), value.fold],
    "uuid:UUID": lambda value: [str(value)],
    **dict.fromkeys(("torch:layout", "torch:memory_format", "torch:qscheme"), lambda value: [str(value)]),
}


def is_plain_value(value: Any) -> bool:
    """Return whether an instance of a class in `VALUES` is fully described by it: a time must be naive or in UTC."""
    return not isinstance(value, datetime) or value.tzinfo in (None, UTC)


def step(path: str, key: object) -> str:
    """Return the path of the item `key` of the object at `path`."""
    return f"{path}/{key if isinstance(key, str) and key.isidentifier() else repr(key)}"


def key_path(path: str, index: int) -> str:
    """Return the path of a key of the dict at `path`, by its index, since the text of a key may change."""
    return f"{path} (key {index})"


def value_path(path: str, index: int) -> str:
    """Return the path of the value that belongs to that key."""
    return f"{path} (value {index})"


def is_plain_key(node: Any) -> bool:
    """Return whether a key with this node has the same value and text in each attempt."""
    if isinstance(node, Instance):
        is_tuple = node.form == "named tuple"
        return node.form in ("enum", "value") or (is_tuple and all(map(is_plain_key, node.state["items"])))
    if type(node) is tuple:
        return all(map(is_plain_key, node))
    return isinstance(node, np.generic) or (type(node) in PLAIN and node == node)


def kind_name(kind: type) -> str:
    """Return the name of a class in snapshots."""
    return kind_text(kind.__module__, kind.__qualname__)


def is_large(value: Any) -> bool:
    """Return whether `value` alone is so large that it is data rather than state.

    >>> [is_large([{"picture": bytes(1 << 20)} for _ in range(number)]) for number in (16, 17)]
    [False, True]
    """
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:  # which has no nbytes of its own
        return sum(part.nbytes for part in indices_and_values(value)) > LARGE_BYTES
    if isinstance(value, (Tensor, np.ndarray)):
        return bool(value.nbytes > LARGE_BYTES)
    if not issubclass(type(value), (list, tuple, dict, set, frozenset, deque)):
        return False
    return len(value) > LARGE_ITEMS or _bytes_in(value, LARGE_SUM) > LARGE_SUM


def _bytes_in(value: Any, most: int) -> int:
    """Return the bytes of arrays and text in nested containers; stops once the sum is more than `most`."""
    total, waiting, seen = 0, [value], set[int]()
    while waiting and total <= most:
        around = waiting.pop()
        if id(around) in seen:  # a circle, or of two names
            continue
        seen.add(id(around))
        items = around.values() if isinstance(around, dict) else around
        for item in () if _NUMBERS.issuperset(map(type, items)) else items:
            if isinstance(item, (Tensor, np.ndarray)):
                total += item.nbytes if not isinstance(item, Tensor) or item.layout == torch.strided else 0
            elif isinstance(item, (str, bytes)):
                total += len(item)
            elif isinstance(item, (list, tuple, dict, deque)) and len(item) <= LARGE_ITEMS:
                waiting.append(item)
    return total
