"""Private names of torch's tensors and modules, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "flipped",
    "foreach_copy",
    "has_plain_names",
    "indices_and_values",
    "is_view_of_one",
    "members_of",
    "transient_buffers_of",
]

#: methods of modules that name their members
_NAMING = ("named_parameters", "named_buffers", "_named_members")


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of `sources` to one of `targets`, in few kernels, without waiting for a device."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def indices_and_values(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor as they are, coalesced or not."""
    return tensor._indices(), tensor._values()


def is_view_of_one(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return True if `tensor` is a view of one of `others`, also on devices without addresses."""
    if not tensor._is_view():
        return False
    memory = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == memory for other in others)


_MEMBERS = "_modules", "_parameters", "_buffers"
_TRANSIENT = itemgetter("_non_persistent_buffers_set")


def members_of(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return the own children, parameters and buffers by name of each module, in one list."""
    try:
        return [*chain.from_iterable(map(itemgetter(*_MEMBERS), map(vars, modules)))]
    except KeyError:  # a module of TorchScript
        return [getattr(module, name) for module in modules for name in _MEMBERS]


def transient_buffers_of(modules: Sequence[nn.Module]) -> list[set[str]]:
    """Return the names of the own buffers of each module that its state_dict leaves out."""
    try:
        return [*map(_TRANSIENT, map(vars, modules))]
    except KeyError:  # a module of TorchScript
        return [module._non_persistent_buffers_set for module in modules]


def has_plain_names(module: nn.Module, submodules: Iterable[nn.Module]) -> bool:
    """Return whether `module` and its submodules name their members as torch does."""
    kinds: set[type[nn.Module]] = {type(submodule) for submodule in submodules}
    is_walked = all(kind.named_modules is nn.Module.named_modules for kind in kinds)
    return is_walked and all(getattr(type(module), name) is getattr(nn.Module, name) for name in _NAMING)


def flipped(tensor: Tensor, bit: str) -> Tensor:
    """Return the view of `tensor` with the opposite bit "conj" or "neg", in the same memory."""
    return tensor.conj() if bit == "conj" else torch._neg_view(tensor)
