"""A replica per process, each splitting its batch over several devices: dp inside a node, ddp across nodes."""

from torch import nn

from midstride.engine.strategies.base import TrainingStep
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.strategies.dp import Splits
from midstride.engine.strategies.replicas import SplitStep

__all__ = ["Ddp2"]


class Ddp2(Splits, Ddp):
    """Start one process a node: a node's whole batch reaches `training_step_end`, gradients are averaged over nodes."""

    name = "ddp2"

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step`, on parts of the batch, inside DDP."""
        return super().wrap(SplitStep(step, self.devices), one_backward=one_backward)
