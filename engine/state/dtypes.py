"""The dtypes that a file can name, from fixed lists, for safety against hostile files."""

import re
from typing import Any

import numpy as np
import torch

__all__ = ["numpy_dtype", "torch_dtype"]

_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _QUANTISED
}
#: numbers, text of fixed length, bytes, times; not Python objects, which would be read as addresses
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSUVMm]\d{0,9}(\[\w{1,16}\])?", re.ASCII)


def torch_dtype(name: Any) -> torch.dtype:
    """Return the dtype called `name`; ValueError if a tensor in a file may not have it."""
    if type(name) is not str or name not in _TORCH_DTYPES:
        raise ValueError(f"no dtype {name!r}")
    return _TORCH_DTYPES[name]


def numpy_dtype(description: Any) -> np.dtype[Any]:
    """Return the dtype of a description in numpy's file format.

    ValueError if it is not one of plain values.
    """
    _check_description(description)
    dtype = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        raise ValueError(f"no dtype of plain values: {description!r}")
    return dtype


def _check_description(description: Any) -> None:
    if isinstance(description, str):
        if not _NUMPY_DTYPE.fullmatch(description):
            raise ValueError(f"no dtype of plain values: {description!r}")
    elif isinstance(description, tuple):  # and a shape
        _check_description(description[0])
    else:
        for field in description:
            _check_description(field[1])
