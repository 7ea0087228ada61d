"""A whole strategy of a user's own, as the page on strategies shows it."""

from collections.abc import Iterable

from torch import Tensor, nn

from midstride.engine.strategies.mixins import ReplicatesParameters
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.strategies.torch_collective import (
    TorchCollective,
    average_gradients,
    broadcast,
)


class Averaged(ReplicatesParameters):
    """Averages gradients after the backward pass. Every rank has all weights."""

    name = "averaged"

    def __init__(self) -> None:
        super().__init__(TorchCollective())

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        broadcast(step.module)  # every rank starts from rank 0's weights
        return super().wrap(step, one_backward=one_backward)

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        average_gradients(parameters, self.device, self.world.size)
