"""Weights that ranks in other processes return: hooks and training may have changed the layers of the module there."""

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from midstride.engine.errors import UserError
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.state.object_nodes import instances_in

__all__ = ["structure_of", "take_weights"]


def structure_of(built: ModuleStructure) -> dict[str, Any] | UserError:
    """Return how a module differs from when it was built, or the error that tells why this cannot be described."""
    try:
        return built.state_dict()
    except UserError as error:
        return error


def take_weights(module: nn.Module, weights: Mapping[str, Tensor], structure: dict[str, Any] | UserError) -> None:
    """Load `weights` of another process into `module`; where they do not fit, change its layers first.

    Args:
        module: as this process built it.
        weights: the state_dict of the module in the other process.
        structure: what `structure_of` returned there.

    Raises:
        UserError: this process cannot build those layers.
    """
    if not _fits(module, weights):
        if isinstance(structure, UserError):
            raise structure
        for _, made in instances_in(structure, "object"):  # this process may not have imported its class yet
            with suppress(ImportError):
                import_module(made.kind.partition(":")[0])
        ModuleStructure(module, torch.device("cpu")).load_state_dict(structure)
    module.load_state_dict(weights)


def _fits(module: nn.Module, weights: Mapping[str, Any]) -> bool:
    """Return whether names and shapes of `weights` are those of `module`; a lazy layer takes its shape from them."""
    own: Mapping[str, Any] = module.state_dict(keep_vars=True)
    pairs = [(own[name], value) for name, value in weights.items() if isinstance(own.get(name), Tensor)]
    return own.keys() == weights.keys() and all(is_lazy(mine) or mine.shape == value.shape for mine, value in pairs)
