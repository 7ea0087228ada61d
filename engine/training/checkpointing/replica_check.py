"""Whether ranks have alike what a snapshot holds once for all of them: parameters and what optimizers keep of them.

User code may write to one rank's alone: noise from that rank's generator, a frozen parameter that counts. Each rank
writes a share of what all have, so a resumed run would have another mixture than any rank had.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from midstride.engine.errors import UnsupportedState
from midstride.engine.formatting import format_names
from midstride.engine.state.codec import walk
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.strategies.base import Strategy
from midstride.engine.training.checkpointing.unsaved_state import is_looked_at

__all__ = ["ReplicaCheck"]

log = logging.getLogger(__name__)

#: of a larger tensor on an accelerator, some elements are compared
_SAMPLE_BYTES = 1 << 20


class ReplicaCheck:
    """Names what the ranks ought to have alike and do not; it looks when `UnsavedStateMonitor` does.

    Args:
        strategy: says what is alike.
        gather: returns every rank's value, in the order of ranks.
    """

    def __init__(self, strategy: Strategy, gather: Callable[[object], list[Any]]) -> None:
        self._strategy, self._gather = strategy, gather
        self._snapshots, self._is_told = 0, False

    def check(self, state: object) -> None:
        """Compare what the ranks have; every rank calls this at every snapshot, until something was found.

        Args:
            state: this rank's tree.
        """
        self._snapshots += 1
        if self._strategy.world.size == 1 or self._is_told or not is_looked_at(self._snapshots):
            return
        found = _differing(self._gather(self._digests(state)))
        self._is_told = bool(found)
        if found and self._strategy.world.is_first:
            log.warning(
                "strategy %s has these alike on all ranks, and user code has written to those of one rank alone: %s. "
                "A resumed run has on every rank what one of them had. Write the same on every rank, or keep what is "
                "each rank's own in an attribute",
                self._strategy.name,
                format_names([path.replace("/", ".") for path in found]),
            )

    def _digests(self, state: object) -> dict[str, str]:
        try:
            leaves = walk(state)[1]
        except UnsupportedState:  # which the writer refuses, on every rank
            return {}
        return {leaf.path: _digest(leaf.tensor) for leaf in leaves if self._strategy.is_replicated(leaf.path)}


def _differing(ranks: Sequence[dict[str, str]]) -> list[str]:
    """Return the names of what is not the same on all ranks; what one of them lacks is the writer's to refuse."""
    return [name for name, digest in ranks[0].items() if any(digest != other.get(name, digest) for other in ranks)]


def _digest(tensor: Tensor) -> str:
    return tensor_digest(tensor, None if tensor.is_cpu else _SAMPLE_BYTES)
