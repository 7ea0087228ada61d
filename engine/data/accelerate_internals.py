"""Place of a loader in Accelerate's `GradientState`, which looks there for an epoch's end.

Accelerate steps on an incomplete last window and drops repeated samples only for loaders that are registered there.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["AcceleratePass", "accelerate_pass", "is_prepared"]


def is_prepared(loader: object) -> bool:
    """Return whether Accelerate's `prepare` made a loader, whose state is missing or wrong.

    It has methods for a state without torchdata's loader in it, too. With that and with workers, the state of an
    epoch's end begins the epoch after next.
    """
    return hasattr(loader, "use_stateful_dataloader")


class AcceleratePass:
    """One pass over a loader, with the attributes that Accelerate reads of an active loader.

    Args:
        remainder: returns the number of samples in the last batch of all ranks, without repeated ones; 0 if the batch
            is full or dropped, -1 if unknown. Accelerate cuts the gathered batch to that number.
    """

    def __init__(self, remainder: Callable[[], int]) -> None:
        self._remainder = remainder
        self.end_of_dataloader = False

    @property
    def remainder(self) -> int:
        """The number of samples to which `gather_for_metrics` cuts the last batch."""
        return self._remainder()

    def returns(self, *, is_last: bool) -> None:
        """Record that the next batch is returned."""
        self.end_of_dataloader = is_last


@contextmanager
def accelerate_pass(remainder: Callable[[], int]) -> Iterator[AcceleratePass]:
    """Register a pass with Accelerate for the block, if Accelerate is loaded in this process."""
    current = AcceleratePass(remainder)
    module: Any = sys.modules.get("accelerate.state")
    if module is None:
        yield current
        return
    gradients = module.GradientState()
    gradients._add_dataloader(current)
    try:
        yield current
    finally:
        gradients._remove_dataloader(current)
