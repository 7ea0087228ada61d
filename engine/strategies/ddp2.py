"""One replica per process over several devices: dp inside a node, ddp across nodes."""

from midstride.engine.strategies.ddp import Ddp
from midstride.engine.strategies.dp import SplitsBatches

__all__ = ["Ddp2"]


class Ddp2(SplitsBatches, Ddp):
    """Starts one process a node. Its whole batch reaches `training_step_end`.

    Gradients are averaged over nodes.
    """

    name = "ddp2"
