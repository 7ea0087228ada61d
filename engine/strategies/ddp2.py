"""A replica per process, each splitting its batch over several devices: dp inside a node, ddp across nodes."""

from midstride.engine.strategies.ddp import Ddp
from midstride.engine.strategies.dp import SplitsBatches

__all__ = ["Ddp2"]


class Ddp2(SplitsBatches, Ddp):
    """Start one process a node: a node's whole batch reaches `training_step_end`, gradients are averaged over nodes."""

    name = "ddp2"
