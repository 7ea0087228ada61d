"""Fast check that attributes have not changed, far cheaper than a walk over the objects."""

import ctypes
import types
from collections.abc import Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import attributes_of, made_by
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.left_out import is_large

__all__ = ["AttributeFingerprint"]

#: values that cannot change
_FIXED = PLAIN | {range, slice}
#: largest number of objects that are compared
_MOST = 10_000
#: path -> (owner, its attributes)
Owners = Mapping[str, tuple[Any, Mapping[str, Any]]]


class AttributeFingerprint:
    """Objects in attributes at the time of the constructor, with digests of arrays.

    Args:
        owners: path -> (owner, its attributes).
    """

    def __init__(self, owners: Owners) -> None:
        self._before = _fingerprint(owners)

    def is_same(self, owners: Owners) -> bool:
        """Return True if nothing has changed; False may also mean that only a walk can tell."""
        if self._before is None or (now := _fingerprint(owners)) is None:
            return False
        (objects, equal), (objects_now, equal_now) = self._before, now
        return equal == equal_now and len(objects) == len(objects_now) and all(map(is_, objects, objects_now))


def _fingerprint(owners: Owners) -> tuple[list[Any], list[Any]] | None:
    """Return objects to compare by identity and values to compare by equality; None if partial."""
    objects: list[Any] = []
    equal: list[Any] = []
    known = {id(owner) for owner, _ in owners.values()}
    arrays: list[Any] = []
    for path, (owner, own) in owners.items():
        equal += [path, *own]
        objects.append(type(owner))
        if not all(_add(value, objects, arrays, known) for value in own.values()):
            return None
    return objects, equal + arrays


def _add(value: Any, objects: list[Any], arrays: list[Any], known: set[int]) -> bool:
    """Add `value` and the objects in it; return whether they cover all that can change."""
    kind = type(value)
    objects.append(value)
    if kind in _FIXED or id(value) in known or is_large(value):
        return True
    if kind in (Tensor, np.ndarray):
        arrays.append(content := _content(value))
        return content is not None
    known.add(id(value))  # references may form a cycle
    if (items := _items(value)) is not None:
        objects.append(kind)
        if PLAIN.issuperset(map(type, items)):
            objects.extend(items)
            return True
        return len(objects) < _MOST and all(_add(item, objects, arrays, known) for item in items)
    return _is_fixed_function(value)


def _items(value: Any) -> list[Any] | None:
    """Return the items of a container or the attributes of an object; None if it may hold more."""
    kind = type(value)
    if kind in (list, tuple):
        return [*value]
    if kind is not dict and not (is_user_class(kind) and made_by(kind) is object):
        return None
    named = value if kind is dict else attributes_of(value)
    return [*named, *named.values()]


def _content(value: Any) -> tuple[Any, ...] | None:
    """Return dtype, shape and digest of an array; None if not contiguous or with other state."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or not value.flags.c_contiguous:
            return None
        return value.dtype, value.shape, xxhash.xxh3_128_digest(value.tobytes())
    is_plain = value.is_cpu and not value.is_nested and value.layout == torch.strided and value.is_contiguous()
    if not is_plain or value.is_conj() or value.is_neg() or value.grad is not None or value.__dict__:
        return None
    return value.dtype, value.shape, xxhash.xxh3_128_digest(ctypes.string_at(value.data_ptr(), value.nbytes))


def _is_fixed_function(value: object) -> bool:
    """Return whether `value` is a function without closure, defaults and attributes."""
    slots = ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")
    return isinstance(value, types.FunctionType) and not any(getattr(value, name) for name in slots)
