"""Compares two readings of a sample."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import members_of
from midstride.engine.state.differences import differences
from midstride.engine.trees import convert, items_of

__all__ = ["collate_name", "copied", "ensure_same_batch", "is_repeatable"]

_KNOWN = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))


def is_repeatable(a: Any, b: Any, deep: int = 8) -> bool:
    """Return whether `a` and `b` have the same bits; unknown objects by their attributes.

    Args:
        a: one reading.
        b: another reading.
        deep: number of levels to compare; deeper values are considered equal.
    """
    if type(a).__qualname__ != type(b).__qualname__:
        return False
    if _is_nested(a) or _is_nested(b):  # the shapes of two jagged tensors differ in a symbol
        return _is_nested(a) and _is_nested(b) and is_repeatable(a.unbind(), b.unbind(), deep)
    if isinstance(a, _KNOWN):
        return not differences(a, b)
    if deep == 0:
        return True
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    left, right = dict(members_of(a)), dict(members_of(b))
    is_same = left.keys() == right.keys() and all(is_repeatable(left[step], right[step], deep - 1) for step in left)
    return is_same or (items_of(a) is None and _has_same_pickle(a, b))


def _has_same_pickle(a: Any, b: Any) -> bool:
    """Return whether two objects have the same pickle, which leaves out caches as of pandas."""
    try:
        return pickle.dumps(a) == pickle.dumps(b)
    except Exception:
        return False


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def copied(samples: Any) -> Any:
    """Return a copy of `samples`, to collate them once more; None if they cannot be copied."""
    try:
        # A tensor is often a view of all the data, and a deep copy would copy the whole storage.
        return copy.deepcopy(convert(samples, Tensor.clone))
    except Exception:  # the samples themselves cannot be collated twice, since collate_fn may change them
        return None


def collate_name(collate: Callable[..., Any]) -> str:
    """Return a collate_fn's name for messages: the function's, or its object's class."""
    return getattr(collate, "__name__", type(collate).__name__)


def ensure_same_batch(collate: Callable[..., Any], batch: Any, again: Any, *, way_out: str) -> None:
    """Check that `collate` made the same batch twice from the same samples and seeds.

    Raises:
        NotExact: the batches differ.
    """
    if is_repeatable(batch, again):
        return
    raise NotExact(
        f"{collate_name(collate)} returned another batch for the same samples and seeds. It "
        "counts its calls, keeps its samples, or draws from an unknown generator. A resumed run and each worker "
        f"would start without that. {way_out}"
    )
