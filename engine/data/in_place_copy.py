"""Copies values into existing objects, so that references to these stay valid."""

import copy
from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["copy_into"]


def copy_into(live: Any, saved: Any) -> Any:
    """Return `live` made equal to `saved` in place, or else a copy of `saved`."""
    if type(live) is type(saved) or (isinstance(live, Tensor) and isinstance(saved, Tensor)):
        for kind, fill in _FILLS:
            if isinstance(live, kind) and fill(live, saved):
                return live
    return copy.deepcopy(saved)


def _fill_tensor(live: Tensor, saved: Tensor) -> bool:
    if (live.shape, live.dtype, live.layout) != (saved.shape, saved.dtype, saved.layout):
        return False
    live.detach().copy_(saved)
    return True


def _fill_array(live: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> bool:
    if (live.shape, live.dtype) != (saved.shape, saved.dtype) or not live.flags.writeable:
        return False
    live[...] = saved
    return True


def _fill_sequence(live: Any, saved: Any) -> bool:
    if getattr(live, "maxlen", None) != getattr(saved, "maxlen", None):
        return False
    before = [*live, *[None] * max(0, len(saved) - len(live))]
    live.clear()
    live.extend(copy_into(old, new) for old, new in zip(before, saved, strict=False))
    return True


def _fill_dict(live: dict[Any, Any], saved: dict[Any, Any]) -> bool:
    before = dict(live)
    live.clear()
    live.update({key: copy_into(before.get(key), value) for key, value in saved.items()})
    return True


def _fill_set(live: set[Any], saved: set[Any]) -> bool:
    live.clear()
    live.update(saved)
    return True


_FILLS: tuple[tuple[Any, Any], ...] = (
    (Tensor, _fill_tensor),
    (np.ndarray, _fill_array),
    ((list, deque), _fill_sequence),
    (dict, _fill_dict),
    (set, _fill_set),
)
