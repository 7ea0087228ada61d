"""Private names of `torch.nn`, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

from torch import Tensor, nn

__all__ = ["buffers_of", "children_of", "is_hooked", "parameters_of", "transient_buffers"]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters, as the dict itself, which can be changed."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers: the dict itself, to be changed."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's children: the dict itself, to be changed."""
    return module._modules


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling `module` itself, not its children, calls more than its forward."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the set of the module's own buffers outside its state_dict, which can be changed."""
    return module._non_persistent_buffers_set
