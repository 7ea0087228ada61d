"""Values left out of snapshots: large ones, which are data, and memory of processes."""

import marshal
import mmap
import multiprocessing.sharedctypes
from collections import deque
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from midstride.engine.code_origin import module_of
from midstride.engine.objects.attributes import own_dict
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.state.torch_internals import indices_and_values

__all__ = ["bytes_in", "content_digest", "is_large", "is_shared"]

#: bytes; a larger value is data, which is watched but not written; `LARGE_SUM` is for all bytes in a container
LARGE_BYTES, LARGE_ITEMS, LARGE_SUM = 1 << 20, 1000, 16 << 20
_NUMBERS = frozenset({type(None), bool, int, float})


def is_large(value: Any) -> bool:
    """Return whether `value` alone is so large that it is data rather than state.

    >>> [is_large([{"picture": bytes(1 << 20)} for _ in range(number)]) for number in (16, 17)]
    [False, True]
    """
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:  # which has no nbytes of its own
        return sum(part.nbytes for part in indices_and_values(value)) > LARGE_BYTES
    if isinstance(value, (Tensor, np.ndarray)):
        return bool(value.nbytes > LARGE_BYTES)
    if callable(getattr(type(value), "memory_usage", None)) and module_of(type(value)).startswith("pandas"):
        return len(value) > LARGE_ITEMS or int(np.sum(value.memory_usage())) > LARGE_BYTES
    if not issubclass(type(value), (list, tuple, dict, set, frozenset, deque)):
        return False
    return len(value) > LARGE_ITEMS or bytes_in(value, LARGE_SUM) > LARGE_SUM


def bytes_in(value: Any, most: int) -> int:
    """Return the bytes of arrays and text in nested containers, up to a sum above `most`."""
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


def content_digest(value: Any) -> str | None:
    """Return a digest of an array, a tensor or a container of plain values, else None."""
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and value.is_cpu and value.layout == torch.strided
        return tensor_digest(value) if is_plain else None
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).data)
    try:
        return xxhash.xxh3_64_hexdigest(marshal.dumps(value))
    except ValueError:  # it holds objects
        return None


def is_shared(value: Any) -> bool:
    """Return whether child processes of this one see later writes to `value`."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.layout == torch.strided and value.is_shared()
    if isinstance(value, np.ndarray):
        return _is_array_shared(value)
    return isinstance(value, multiprocessing.sharedctypes.SynchronizedBase) or _is_allocated(value)


def _is_array_shared(array: Any) -> bool:
    """Return whether the memory of an array is shared memory, or a mapped file."""
    if getattr(array, "mode", None) == "c":  # of a file, and written to a copy
        return False
    base = array.base.obj if isinstance(array.base, memoryview) else array.base
    return isinstance(base, mmap.mmap) or (base is not None and is_shared(base))


def _is_allocated(value: object) -> bool:
    """Return whether a ctypes object is in memory that multiprocessing has allocated."""
    return "_wrapper" in own_dict(value)
