"""Arrays that come to share memory in training: a file holds each of them alone, so they are named."""

import logging
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.unwritable import few, shown

__all__ = ["ArraySharing"]

log = logging.getLogger(__name__)


class ArraySharing:
    """Watches which arrays are views of others, or of tensors.

    Those that every attempt builds are filled in place, and go on to share. Of others it matters only if training
    writes into them: so they are named once that is seen.
    """

    def __init__(self) -> None:
        self._built: set[tuple[str, ...]] = set()
        self._digests: dict[tuple[str, ...], list[int]] = {}

    def begin(self, walk: GraphWalk) -> None:
        """Note what every attempt builds."""
        self._built = set(_groups(walk))

    def tell(self, walk: GraphWalk) -> None:
        """Name those that came to share memory and have changed since, once."""
        for paths, arrays in _groups(walk).items():
            if paths in self._built:
                continue
            digests = [xxhash.xxh3_64_intdigest(array.tobytes()) for array in arrays]
            if self._digests.setdefault(paths, digests) != digests:
                self._built.add(paths)
                log.warning(
                    "these came to share memory in training, which writes into it: %s. A resumed run has each array in "
                    "memory of its own: use tensors, or make them in __init__",
                    few([shown(path) for path in paths]),
                )


def _groups(walk: GraphWalk) -> dict[tuple[str, ...], list[Any]]:
    """Return the arrays that share memory with other arrays or with tensors, by the paths of all of them."""
    arrays = [(path, value) for path, value in walk.seen.values() if _is_watched(value)]
    if not arrays:
        return {}
    groups: dict[int, list[tuple[str, Any]]] = {}
    for path, value in arrays:
        groups.setdefault(_address(value), []).append((path, value))
    for path, value in walk.seen.values():
        if isinstance(value, Tensor) and value.is_cpu and value.layout == torch.strided and value.numel():
            groups.get(value.untyped_storage().data_ptr(), []).append((path, value))
    found = {}
    for members in groups.values():
        shared = [pair for pair in members if any(_overlap(pair[1], other) for _, other in members)]
        if shared:
            found[tuple(sorted(path for path, _ in shared))] = [v for _, v in shared if isinstance(v, np.ndarray)]
    return found


def _is_watched(value: object) -> bool:
    return type(value) is np.ndarray and value.dtype != object and value.flags.writeable and value.size > 0


def _address(array: Any) -> int:
    """Return where the memory begins that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if isinstance(array.base, Tensor):
        return array.base.untyped_storage().data_ptr()
    address: int = array.__array_interface__["data"][0]
    return address


def _overlap(one: Any, other: Any) -> bool:
    if one is other:
        return False
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return not (isinstance(one, Tensor) and isinstance(other, Tensor))
    return np.shares_memory(one, other)
