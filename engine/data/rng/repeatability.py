"""Whether two readings of a sample are the same, as far as can be seen."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from midstride.engine.state.codec import differences

__all__ = ["is_repeatable"]

_KNOWN = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))


def is_repeatable(a: Any, b: Any, deep: int = 8) -> bool:
    """Return whether `a` and `b` have the same bits; objects of unknown kinds are compared by their attributes.

    Args:
        a: one reading.
        b: another.
        deep: levels to look into; what is nested deeper is taken for the same.
    """
    if type(a).__qualname__ != type(b).__qualname__:
        return False
    if isinstance(a, _KNOWN):
        return not differences(a, b)
    if deep == 0:
        return True
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_repeatable(a[key], b[key], deep - 1) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_repeatable(left, right, deep - 1) for left, right in zip(a, b, strict=True))
    return is_repeatable(dict(getattr(a, "__dict__", {})), dict(getattr(b, "__dict__", {})), deep - 1)
