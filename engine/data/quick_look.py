"""A look at attributes that tells, in a fraction of the time of a walk, that nothing in them has changed."""

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
from midstride.engine.objects.plain_values import PLAIN, is_large

__all__ = ["QuickLook"]

#: values that cannot change
_FIXED = PLAIN | {range, slice}
#: objects that are looked at
_MOST = 10_000
#: owners by path, each with its attributes
Owners = Mapping[str, tuple[Any, Mapping[str, Any]]]


class QuickLook:
    """What stood in attributes. Where the same objects stand there, and cannot have changed, they hold the same.

    Args:
        owners: by path, each with its attributes.
    """

    def __init__(self, owners: Owners) -> None:
        self._seen = _look(owners)

    def is_same(self, owners: Owners) -> bool:
        """Return whether nothing has changed; False also where only a walk can tell."""
        if self._seen is None or (now := _look(owners)) is None:
            return False
        (objects, equal), (objects_now, equal_now) = self._seen, now
        return equal == equal_now and len(objects) == len(objects_now) and all(map(is_, objects, objects_now))


def _look(owners: Owners) -> tuple[list[Any], list[Any]] | None:
    """Return which objects there are, and what else is to be equal; None if that does not say all."""
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
    """Add what `value` is made of; return whether that is all that can change of it."""
    kind = type(value)
    objects.append(value)
    if kind in _FIXED or id(value) in known or is_large(value):
        return True
    if kind in (Tensor, np.ndarray):
        arrays.append(content := _content(value))
        return content is not None
    known.add(id(value))  # what is in a circle is looked at once
    if (items := _items(value)) is not None:
        objects.append(kind)
        if PLAIN.issuperset(map(type, items)):
            objects.extend(items)
            return True
        return len(objects) < _MOST and all(_add(item, objects, arrays, known) for item in items)
    return _is_fixed_function(value)


def _items(value: Any) -> list[Any] | None:
    """Return what a container or an object holds; None if it may hold more than that."""
    kind = type(value)
    if kind in (list, tuple):
        return [*value]
    if kind is not dict and not (is_user_class(kind) and made_by(kind) is object):
        return None
    named = value if kind is dict else attributes_of(value)
    return [*named, *named.values()]


def _content(value: Any) -> tuple[Any, ...] | None:
    """Return the kind of an array and a digest of its bytes; None of what lies in memory in another way."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or not value.flags.c_contiguous:
            return None
        return value.dtype, value.shape, xxhash.xxh3_128_digest(value.tobytes())
    is_plain = value.is_cpu and value.layout == torch.strided and value.is_contiguous()
    if not is_plain or value.is_conj() or value.is_neg() or value.grad is not None or value.__dict__:
        return None
    return value.dtype, value.shape, xxhash.xxh3_128_digest(ctypes.string_at(value.data_ptr(), value.nbytes))


def _is_fixed_function(value: object) -> bool:
    """Return whether `value` is a function that holds nothing."""
    slots = ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")
    return isinstance(value, types.FunctionType) and not any(getattr(value, name) for name in slots)
