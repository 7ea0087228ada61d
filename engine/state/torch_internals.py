"""Private names of torch's tensors, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["foreach_copy", "indices_and_values", "is_view_of_one"]


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of `sources` to one of `targets`, in few kernels, without waiting for a device."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def indices_and_values(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor as they are, coalesced or not."""
    return tensor._indices(), tensor._values()


def is_view_of_one(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return True if `tensor` is a view of one of `others`, also on devices without addresses."""
    if not tensor._is_view():
        return False
    memory = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == memory for other in others)
