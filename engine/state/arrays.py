"""numpy values as JSON and tensors, with exact dtypes: byte order, structure and units."""

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.state.bounds import sizes
from midstride.engine.state.dtypes import numpy_dtype

__all__ = ["array_of", "describe_dtype", "dtype_of", "scalar_of", "tensor_of"]

Array = np.ndarray[Any, Any]


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return `dtype` in numpy's file format; None if the format cannot describe it fully."""
    if dtype.hasobject:
        return None
    description = dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)
    return description if dtype_of(description) == dtype else None


def dtype_of(description: Any) -> np.dtype[Any]:
    """Return the dtype that `describe_dtype` described."""
    return numpy_dtype(description)


def tensor_of(array: Array) -> tuple[Tensor, str]:
    """Return a copy of `array` as a tensor, and its memory order, C or F.

    The copy has bytes if torch lacks the dtype.
    """
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    plain = np.array(array.T if order == "F" else array, order="C", copy=True)
    try:
        return torch.from_numpy(plain), order
    except (TypeError, ValueError):  # a dtype or a byte order torch does not have
        return torch.from_numpy(np.frombuffer(bytearray(plain.tobytes()), np.uint8)), order


def array_of(tensor: Tensor, dtype: np.dtype[Any], shape: list[int], order: str) -> Array:
    """Return the array that `tensor_of` was given, in the memory of `tensor`."""
    extents = sizes(shape)
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    if flat.nbytes != dtype.itemsize * prod(extents):
        raise ValueError(f"{flat.nbytes} bytes for an array {extents} of {dtype}")
    plain: Array = np.ndarray(extents[::-1] if order == "F" else extents, dtype, buffer=flat)
    return plain.T if order == "F" else plain


def scalar_of(data: bytes, dtype: np.dtype[Any]) -> Any:
    """Return the numpy scalar of `dtype` whose bytes are `data`."""
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a scalar of {dtype}")
    return np.ndarray((), dtype, buffer=data)[()]
