"""Privates of torch's tensors, named here alone; `tests/unit/test_internals.py` tries each of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["foreach_copy", "indices_and_values"]


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of `sources` to one of `targets`, in few kernels, without waiting for a device."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def indices_and_values(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor as they are, coalesced or not."""
    return tensor._indices(), tensor._values()
