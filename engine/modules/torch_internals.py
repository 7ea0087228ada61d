"""Privates of `torch.nn`, named here alone; `tests/unit/test_internals.py` tries each of them."""

from torch import Tensor, nn

__all__ = ["buffers_of", "children_of", "parameters_of", "transient_buffers"]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters, not those of its children: the dict itself, to be changed."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers: the dict itself, to be changed."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's children: the dict itself, to be changed."""
    return module._modules


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that its state_dict leaves out: the set itself, to be changed."""
    return module._non_persistent_buffers_set
