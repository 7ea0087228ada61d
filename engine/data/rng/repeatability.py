"""Whether two readings of a sample are the same, as far as can be seen."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import members_of
from midstride.engine.state.codec import differences
from midstride.engine.trees import convert

__all__ = ["collate_name", "copied", "ensure_same_batch", "is_repeatable"]

_KNOWN = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))


def is_repeatable(a: Any, b: Any, deep: int = 8) -> bool:
    """Return whether `a` and `b` have the same bits; objects of unknown kinds are compared by their attributes.

    Args:
        a: one reading.
        b: another.
        deep: levels to look into; what is nested deeper is taken for the same.
    """
    if type(a).__qualname__ != type(b).__qualname__:
        return False
    if isinstance(a, _KNOWN):
        return not differences(a, b)
    if deep == 0:
        return True
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    left, right = dict(members_of(a)), dict(members_of(b))
    return left.keys() == right.keys() and all(is_repeatable(left[step], right[step], deep - 1) for step in left)


def copied(samples: Any) -> Any:
    """Return a copy of `samples` that can be collated once more; None if there is none."""
    try:
        # A tensor is often a view of all the data, and a deep copy of one copies what it is a view of.
        return copy.deepcopy(convert(samples, Tensor.clone))
    except Exception:  # they hold what cannot be copied, and collate may take from them what a second one would miss
        return None


def collate_name(collate: Callable[..., Any]) -> str:
    """Return what messages call a collate_fn: its name, or of an object that is called its class's."""
    return getattr(collate, "__name__", type(collate).__name__)


def ensure_same_batch(collate: Callable[..., Any], batch: Any, again: Any, *, way_out: str) -> None:
    """Look whether `collate` made the same of the same samples and seeds.

    Raises:
        NotExact: it did not.
    """
    if is_repeatable(batch, again):
        return
    raise NotExact(
        f"{collate_name(collate)} gave another batch when it was given the same samples again with the same seeds: it "
        "counts its calls, keeps what it was given, or draws from a generator that cannot be found. A resumed run, and "
        f"each worker, would begin it anew. {way_out}"
    )
