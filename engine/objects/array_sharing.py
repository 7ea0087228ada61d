"""Finds arrays that come to share memory in training, which snapshots cannot express, for a warning."""

from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from midstride.engine.objects.node_writers import has_memory
from midstride.engine.objects.walk import GraphWalk

__all__ = ["ArraySharing"]

#: number of elements of a larger array that are sampled with each snapshot
_LARGE_BYTES, _SAMPLES = 1 << 20, 30_000


class ArraySharing:
    """Finds arrays that came to share memory with other arrays, or with tensors, and that training writes to.

    Arrays that every attempt builds are filled in place and still share memory in a resumed run; others do not.
    """

    def __init__(self) -> None:
        self._built: set[str] = set()
        self._named: set[str] = set()
        self._digests: dict[str, int] = {}

    def begin(self, walk: GraphWalk) -> None:
        """Record which arrays share memory when training begins, as in every attempt."""
        self._built = {path for group in _groups(walk) for path in group}

    def written(self, walk: GraphWalk) -> list[list[str]]:
        """Return paths of arrays that came to share memory and have changed since the last walk, each group once."""
        found = []
        digests: dict[str, int] = {}
        for group in _groups(walk):
            if self._built.issuperset(group) or not self._named.isdisjoint(group):
                continue
            now = {path: _digest(value) for path, value in group.items() if isinstance(value, np.ndarray)}
            digests |= now
            if any(self._digests.get(path, digest) != digest for path, digest in now.items()):
                self._named.update(group)
                found.append([*group])
        self._digests = digests
        return found


def _groups(walk: GraphWalk) -> list[dict[str, Any]]:
    """Return groups of arrays and tensors that share memory, by path; each has at least one array."""
    members: dict[int, dict[str, Any]] = {}
    for path, value in walk.seen.values():
        if _is_watched(value):
            members.setdefault(_address(value), {})[path] = value
    if members:
        for path, value in walk.seen.values():
            if isinstance(value, Tensor) and value.is_cpu and has_memory(value):
                members.get(value.untyped_storage().data_ptr(), {})[path] = value
    groups = (_overlapping(group) for group in members.values() if len(group) > 1)
    return [group for group in groups if group]


def _is_watched(value: object) -> bool:
    return type(value) is np.ndarray and value.dtype != object and value.flags.writeable and value.size > 0


def _address(array: Any) -> int:
    """Return the address of the memory of which an array is a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if isinstance(array.base, Tensor):
        return array.base.untyped_storage().data_ptr()
    address: int = array.__array_interface__["data"][0]
    return address


def _overlapping(group: dict[str, Any]) -> dict[str, Any]:
    """Return those of `group` whose elements overlap with those of another member."""
    bounds = {path: _bounds(value) for path, value in group.items()}
    found: set[str] = set()
    before = last = ""
    for path in sorted(group, key=bounds.__getitem__):
        for other in filter(None, (before, last)):
            if bounds[path][0] < bounds[other][1] and _share(group[path], group[other]):
                found |= {path, other}
        before = path
        last = path if not last or bounds[path][1] > bounds[last][1] else last
    return {path: value for path, value in group.items() if path in found}


def _bounds(value: Any) -> tuple[int, int]:
    """Return the addresses of begin and end of an array or a tensor."""
    if isinstance(value, np.ndarray):
        return np.lib.array_utils.byte_bounds(value)
    length = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + length * value.element_size()


def _share(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    return isinstance(one, np.ndarray) or isinstance(other, np.ndarray)  # tensors alone go on to share


def _digest(array: Any) -> int:
    """Return a digest of an array; of a large one, of elements spread over it."""
    if array.nbytes > _LARGE_BYTES:
        per_axis = int(_SAMPLES ** (1 / array.ndim)) + 1
        array = array[tuple(slice(None, None, max(1, size // per_axis)) for size in array.shape)]
    return xxhash.xxh3_64_intdigest(array.tobytes())
