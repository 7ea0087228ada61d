"""Tensors taken for those of a GPU: what reads one by the host is a wait for the device, and is counted."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from midstride.engine.checkpointing import finite_losses
from midstride.engine.metrics import values

#: operations that give the host a number or a bool
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}


class WaitCounter(TorchDispatchMode):
    """Counts, by operation, the times that the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not _fetches():
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _fetches() -> bool:
    """Whether a batch is being read: samples are the host's."""
    return any(frame.filename.endswith("/engine/data/seeded_dataset.py") for frame in traceback.extract_stack(limit=40))


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Have the engine treat every tensor as one that the host would have to wait for."""
    before = values.is_on_host

    def never(tensor: Tensor) -> bool:
        return False

    values.is_on_host = finite_losses.is_on_host = never
    try:
        yield
    finally:
        values.is_on_host = finite_losses.is_on_host = before
