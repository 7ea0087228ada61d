"""Differences of two trees of state, bit for bit."""

import ctypes
import math
import operator
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.state.object_nodes import Instance, Same
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.state.tensors import form_of
from midstride.engine.state.torch_internals import indices_and_values

__all__ = ["Digested", "Placed", "StandIn", "differences", "first_difference", "iter_differences", "same_key_order"]

#: bytes from which on tensors are compared eight bytes at a time
_LARGE_BYTES = 1 << 16


class StandIn(ABC):
    """Stands for a tensor in a copied tree."""

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def is_of(self, value: object) -> bool:
        """Return whether it stands for `value`, or for the same tensor as the stand-in `value`."""


@dataclass(frozen=True)
class Digested(StandIn):
    """A large tensor's dtype, shape and digest, in place of its content."""

    dtype: torch.dtype
    shape: torch.Size
    digest: str

    @classmethod
    def of(cls, tensor: Tensor) -> "Digested":
        """Return the stand-in for `tensor`."""
        return cls(tensor.dtype, tensor.shape, tensor_digest(tensor))

    def is_of(self, value: object) -> bool:
        """Return whether form and digest are those of `value`."""
        if isinstance(value, Digested):
            return self == value
        if not isinstance(value, Tensor) or (value.dtype, value.shape) != (self.dtype, self.shape):
            return False
        return tensor_digest(value) == self.digest


class Placed(StandIn):
    """The place of a live tensor; tensors with the same memory and form have the same place.

    Args:
        tensor: kept alive, so that no other takes its memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape

    def is_of(self, value: object) -> bool:
        """Return whether `value` is a tensor of that form in that memory."""
        mine = self._tensor
        if value is mine:
            return True
        if type(mine) is not Tensor or type(value) is not Tensor or not (_is_strided(mine) and _is_strided(value)):
            return False
        return form_of(mine) == form_of(value) and mine.data_ptr() == value.data_ptr() != 0


#: to ask whether they are mappings takes longer than to compare them
_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None)})


def differences(a: object, b: object) -> list[str]:
    """Return one line for each difference of `a` and `b`: the path, and both values in short.

    Types, dtypes, shapes and bits count (NaN equals NaN of the same bits, -0.0 is not 0.0); strides, devices and the
    order of keys do not.

    >>> differences({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1, "betas": (0.9, 0.95)})
    ['betas/1 (0.99, now 0.95)']
    """
    return [*_lines(a, b)]


def first_difference(a: object, b: object) -> str | None:
    """Return the first of `differences`, or None; stops at the first difference.

    >>> first_difference([1, 2, 3], [1, 5, 6])
    '1 (2, now 5)'
    """
    return next(_lines(a, b), None)


def iter_differences(a: object, b: object) -> Iterator[tuple[str, str, str]]:
    """Yield the differences as triples: path, value in `a`, value in `b`, all as text."""
    return _walk(a, b, "")


def same_key_order(a: object, b: object) -> bool:
    """Return True if all mappings of two equal trees have their keys in the same order.

    >>> same_key_order({"x": 1, "y": 2}, {"y": 2, "x": 1})
    False
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same_key_order(a[key], b[key]) for key in a)
    if isinstance(a, Instance) and isinstance(b, Instance):
        return all(same_key_order(a.state[key], b.state.get(key)) for key in a.state)
    if isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        return _are_integers(a) or all(map(same_key_order, a, b))
    return True


def _lines(a: object, b: object) -> Iterator[str]:
    for path, left, right in iter_differences(a, b):
        yield f"{path or 'the whole'} ({left}, now {right})"


def _walk(a: Any, b: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if type(a) is not type(b) and not isinstance(a, StandIn):
        yield path, _brief(a), _brief(b)
    elif isinstance(a, Tensor):
        if not _same_tensor(a, b):
            yield path, _brief(a), _brief(b)
    elif type(a) not in _LEAVES and isinstance(a, Mapping):
        yield from _walk_mapping(a, b, path)
    elif isinstance(a, Instance) and (a.form, a.kind) == (b.form, b.kind):
        yield from _walk_instance(a, b, path)
    elif isinstance(a, (list, tuple, deque)):
        yield from _walk_sequence(a, b, path)
    elif not _same_value(a, b):
        yield path, _brief(a), _brief(b)


def _walk_sequence(a: Any, b: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if len(a) != len(b):
        yield path, f"{len(a)} items", f"{len(b)} items"
    elif isinstance(a, deque) and a.maxlen != b.maxlen:
        yield path, f"maxlen {a.maxlen}", f"maxlen {b.maxlen}"
    elif not (_are_integers(a) and _are_integers(b) and all(map(operator.eq, a, b))):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _walk(left, right, _join(path, index))


def _are_integers(items: Any) -> bool:
    """Return whether all items are of type int, as the 625 of a state of `random`."""
    return {*map(type, items)} == {int}


def _walk_instance(a: Instance, b: Instance, path: str) -> Iterator[tuple[str, str, str]]:
    for key in {**a.state, **b.state}:
        # as the user's code calls it
        where = path if key in ("attributes", "items", "value", "base") else _join(path, key)
        yield from _walk(a.state.get(key), b.state.get(key), where)


def _walk_mapping(a: Mapping[Any, Any], b: Mapping[Any, Any], path: str) -> Iterator[tuple[str, str, str]]:
    for key in a:
        if key not in b:
            yield _join(path, key), _brief(a[key]), "missing"
        else:
            yield from _walk(a[key], b[key], _join(path, key))
    for key in b:
        if key not in a:
            yield _join(path, key), "missing", _brief(b[key])


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, StandIn):
        return a.is_of(b)
    if type(a) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if type(a) is complex:
        return struct.pack(">dd", a.real, a.imag) == struct.pack(">dd", b.real, b.imag)
    if isinstance(a, (np.ndarray, np.void)) and a.dtype.names and a.dtype == b.dtype and a.shape == b.shape:
        return all(_same_value(a[name], b[name]) for name in a.dtype.names)  # bytes between the fields do not count
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout == torch.sparse_coo:
        return all(map(_same_tensor, indices_and_values(a), indices_and_values(b)))
    if _is_small(a) and _is_small(b):  # of which there may be a thousand: half the time
        return ctypes.string_at(a.data_ptr(), a.nbytes) == ctypes.string_at(b.data_ptr(), b.nbytes)
    x, y = _bytes(a), _bytes(b)
    if x.numel() >= _LARGE_BYTES and not (x.numel() % 8 or x.storage_offset() % 8 or y.storage_offset() % 8):
        x, y = x.view(torch.int64), y.view(torch.int64)  # a fifth of the time
    return torch.equal(x, y)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous on the CPU and has few bytes."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_cpu and tensor.is_contiguous()
    return (
        is_plain
        and not tensor.is_quantized
        and 0 < tensor.nbytes < _LARGE_BYTES
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return plain.reshape(-1).contiguous().view(torch.uint8)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _brief(value: object) -> str:
    if isinstance(value, (Tensor, np.ndarray, StandIn)):
        form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, StandIn) or math.prod(value.shape) != 1:
            return form
        return f"{form} {value.reshape(-1)[0].item()!r}"
    if isinstance(value, (Instance, Same)):
        return value.kind if isinstance(value, Instance) else f"the same as {value.path}"
    text = repr(value)
    kind = "" if isinstance(value, (type(None), bool, int, float, str, bytes)) else f"{type(value).__name__} "
    return f"{kind}{text if len(text) <= 40 else text[:37] + '...'}"
