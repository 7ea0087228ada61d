"""Memory of numpy arrays: which array or tensor lies in it, and where."""

import operator
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["ArrayMemory", "address_of", "bounds_of", "owner_of"]


class ArrayMemory:
    """Memory of arrays, and of tensors in it.

    Args:
        arrays: the arrays.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        spans = sorted({_span_of(owner_of(array)) for array in arrays})
        ends = accumulate((end for _, end in spans), max)
        #: begins and ends of memory, ascending; that of several owners that overlap is one
        self._starts: list[int] = []
        self._ends: list[int] = []
        for (start, _), end in zip(spans, ends, strict=True):
            if not self._ends or start >= self._ends[-1]:
                self._starts.append(start)
                self._ends.append(end)
            self._ends[-1] = end

    def span_of(self, value: Any) -> tuple[int, int] | None:
        """Return begin and end of the memory around an array or a tensor; None if no array is there."""
        address = value.data_ptr() if isinstance(value, Tensor) else address_of(value)
        at = bisect_right(self._starts, address) - 1
        return (self._starts[at], self._ends[at]) if at >= 0 and address < self._ends[at] else None


def owner_of(array: Any) -> Any:
    """Return the array or tensor that owns the memory of an array."""
    while isinstance(base := getattr(array, "base", None), (np.ndarray, Tensor)):
        array = base
        if isinstance(array, Tensor):
            break
    return array


def address_of(array: Any) -> int:
    """Return the address of the first element of an array, or of a row of one."""
    if not isinstance(array, np.ndarray):
        array = np.frombuffer(array, dtype=np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


def bounds_of(value: Any) -> tuple[int, int]:
    """Return the addresses of begin and end of an array, a row or a tensor."""
    if isinstance(value, Tensor):
        length = 1 + sum(map(operator.mul, (size - 1 for size in value.shape), value.stride()))
        return value.data_ptr(), value.data_ptr() + length * value.element_size()
    if isinstance(value, np.ndarray):
        return np.lib.array_utils.byte_bounds(value)
    return address_of(value), address_of(value) + value.nbytes


def _span_of(owner: Any) -> tuple[int, int]:
    if isinstance(owner, Tensor):
        storage = owner.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return bounds_of(owner)
