"""Detects memory that is shared between processes."""

import mmap
import multiprocessing.sharedctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["is_shared"]


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
    return "_wrapper" in getattr(value, "__dict__", ())
