"""One process, one device."""

from typing import Any

from torch import nn

from midstride.engine.strategies.base import Strategy, TrainingStep

__all__ = ["Single"]


class Single(Strategy):
    """Train in this process alone; nothing is exchanged with anybody."""

    name = "single"

    def init_process_group(self) -> None:
        """Do nothing: there are no other ranks."""

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` as it is."""
        return step

    def gather(self, value: object) -> list[Any]:
        """Return `value` alone."""
        return [value]
