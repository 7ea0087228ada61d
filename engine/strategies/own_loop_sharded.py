"""The ranks of a loop of the user's own whose modules are sharded by `fully_shard`."""

from torch import nn

from midstride.engine.state.stateful import Stateful
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.own_loop import FIXED_WORLD
from midstride.engine.strategies.sharded import FullySharded, ShardedState

__all__ = ["OwnShardedLoop"]


class OwnShardedLoop(FullySharded):
    """Trains modules that the user's loop calls, whose weights are sharded.

    Args:
        collective: the ranks.
        modules: all modules as one; None to shard one by `shard` only.
    """

    name = "own loop, sharded"
    fixed_world = FIXED_WORLD

    def __init__(self, collective: Collective, modules: nn.Module | None = None) -> None:
        super().__init__()
        self.collective, self._modules = collective, modules

    def wrap_state(self, part: Stateful) -> Stateful:
        """Return `part` with its tensors as row shards."""
        assert self._modules is not None
        return ShardedState(part, self._modules, self.world.size)
