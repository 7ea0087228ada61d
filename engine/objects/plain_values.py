"""What is a value by itself: written as it is or from a few arguments, and what of it is too large to be state."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.state.nodes import kind_text
from midstride.engine.state.torch_internals import indices_and_values

__all__ = ["PLAIN", "VALUES", "is_large", "kind_name", "step"]

#: values that never change, written as they are
PLAIN = frozenset({type(None), bool, int, float, str, complex, bytes, torch.Size, torch.dtype, torch.device})
#: what is larger than this is data, which is watched and not written
LARGE_BYTES, LARGE_ITEMS = 1 << 20, 1000
#: immutable values of the standard library -> what makes them anew
VALUES: dict[str, Callable[[Any], list[Any]]] = {
    "builtins:range": lambda value: [value.start, value.stop, value.step],
    "builtins:slice": lambda value: [value.start, value.stop, value.step],
    "decimal:Decimal": lambda value: [str(value)],
    "fractions:Fraction": lambda value: [value.numerator, value.denominator],
    "pathlib:PosixPath": lambda value: [str(value)],
    "datetime:timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime:date": lambda value: [value.year, value.month, value.day],
    "uuid:UUID": lambda value: [str(value)],
}


def step(path: str, key: object) -> str:
    """Return the path of what stands at `key` of `path`."""
    return f"{path}/{key if isinstance(key, str) and key.isidentifier() else repr(key)}"


def kind_name(kind: type) -> str:
    """Return what a class is called in a snapshot."""
    return kind_text(kind.__module__, kind.__qualname__)


def is_large(value: Any) -> bool:
    """Return whether `value` alone is so large that it is data rather than state."""
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:  # which has no nbytes of its own
        return sum(part.nbytes for part in indices_and_values(value)) > LARGE_BYTES
    if isinstance(value, (Tensor, np.ndarray)):
        return bool(value.nbytes > LARGE_BYTES)
    return isinstance(value, (list, tuple, dict, set, frozenset, deque)) and len(value) > LARGE_ITEMS
