"""Weights that come back from another process, where hooks and training may have given the module other layers."""

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from midstride.engine.errors import UserError
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.state.nodes import instances_in

__all__ = ["structure_of", "take_weights"]


def structure_of(built: ModuleStructure) -> dict[str, Any] | UserError:
    """Return how a module differs from when it was built, or why nothing can say that."""
    try:
        return built.state_dict()
    except UserError as error:
        return error


def take_weights(module: nn.Module, weights: Mapping[str, Tensor], structure: dict[str, Any] | UserError) -> None:
    """Give `module` the `weights` of another process, and the layers that they are of where it has others.

    Raises:
        UserError: it cannot have such layers.
    """
    if not _fits(module, weights):
        if isinstance(structure, UserError):
            raise structure
        for _, made in instances_in(structure, "object"):  # its class may have been imported there alone
            with suppress(ImportError):
                import_module(made.kind.partition(":")[0])
        ModuleStructure(module, torch.device("cpu")).load_state_dict(structure)
    module.load_state_dict(weights)


def _fits(module: nn.Module, weights: Mapping[str, Any]) -> bool:
    """Return whether `module` has what `weights` are of; a lazy layer takes its shape from them."""
    own: Mapping[str, Any] = module.state_dict(keep_vars=True)
    pairs = [(own[name], value) for name, value in weights.items() if isinstance(own.get(name), Tensor)]
    return own.keys() == weights.keys() and all(is_lazy(mine) or mine.shape == value.shape for mine, value in pairs)
