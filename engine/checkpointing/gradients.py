"""The gradients within an accumulation window, as one part of the state of a run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.state.module_index import ModuleIndex

__all__ = ["Gradients"]


class Gradients:
    """The gradients of this rank within an accumulation window; empty between steps."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._index = module, ModuleIndex.of(module)

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients by the names of their parameters, without those that are None."""
        return {name: p.grad for name, p in self._index.now().parameters.items() if p.grad is not None}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the gradients; parameters that have none in `state_dict` get None."""
        for name, parameter in self._module.named_parameters():
            parameter.grad = state_dict[name].to(parameter.device) if name in state_dict else None

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the mean over the ranks, as exchanged at the end of a window."""
        names = dict.fromkeys(name for state in states for name in state)
        return {name: _mean([state[name] for state in states if name in state], len(states)) for name in names}


def _mean(gradients: Sequence[Tensor], ranks: int) -> Tensor:
    if len(gradients) == ranks and all(torch.equal(gradients[0], other) for other in gradients):
        return gradients[0]  # they were exchanged already
    return torch.stack(list(gradients)).sum(0) / ranks
