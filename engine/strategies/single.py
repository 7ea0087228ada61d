"""One process, one device."""

from collections.abc import Iterable

from torch import Tensor, nn

from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.step import TrainingStep

__all__ = ["Single"]


class Single(Strategy):
    """Train in this process alone and exchange nothing."""

    name = "single"

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` itself."""
        return step

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: there are no other ranks."""

    def is_replicated(self, path: str) -> bool:
        """Return True: there is one rank."""
        return True
