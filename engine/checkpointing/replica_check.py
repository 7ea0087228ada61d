"""Checks that replicated tensors (parameters, optimizer states) are the same on all ranks.

User code may change them on one rank only, such as by noise from that rank's generator. Since each rank writes a share
of the replicated tensors, a resumed run would get a mixture that no rank had.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from midstride.engine.checkpointing.unsaved_state import is_checked_at
from midstride.engine.errors import UnsupportedState
from midstride.engine.formatting import format_names
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.strategies.base import Strategy

__all__ = ["ReplicaCheck"]

log = logging.getLogger(__name__)

#: bytes of a tensor on an accelerator beyond which only some elements are compared
_SAMPLE_BYTES = 1 << 20


class ReplicaCheck:
    """Warns of replicated tensors that differ, at the same snapshots as `UnsavedStateMonitor`.

    Args:
        strategy: strategy, which knows the replicated tensors.
        gather: returns every rank's value, in the order of ranks.
    """

    def __init__(self, strategy: Strategy, gather: Callable[[object], list[Any]]) -> None:
        self._strategy, self._gather = strategy, gather
        self._snapshots, self._has_warned = 0, False

    def check(self, state: object) -> None:
        """Compare the ranks' tensors until a difference is found; all ranks call this per snapshot.

        Args:
            state: this rank's tree of state.
        """
        self._snapshots += 1
        if self._strategy.world.size == 1 or self._has_warned or not is_checked_at(self._snapshots):
            return
        found = _differing(self._gather(self._digests(state)))
        self._has_warned = bool(found)
        if found and self._strategy.world.is_first:
            log.warning(
                "strategy %s keeps these equal on all ranks, but user code has changed them on one rank only: %s. A "
                "resumed run restores one rank's values on all ranks. Write the same values on every rank, or keep a "
                "rank's own value in an attribute",
                self._strategy.name,
                format_names([path.replace("/", ".") for path in found]),
            )

    def _digests(self, state: object) -> dict[str, str]:
        try:
            leaves = encode_lazily(state)[1]
        except UnsupportedState:  # the writer raises it later, on every rank
            return {}
        return {path: _digest(tensor) for path, tensor in leaves.items() if self._strategy.is_replicated(path)}


def _differing(ranks: Sequence[dict[str, str]]) -> list[str]:
    """Return the paths of tensors that differ between ranks.

    The writer refuses those that a rank lacks.
    """
    return [name for name, digest in ranks[0].items() if any(digest != other.get(name, digest) for other in ranks)]


def _digest(tensor: Tensor) -> str:
    return tensor_digest(tensor, None if tensor.is_cpu else _SAMPLE_BYTES)
