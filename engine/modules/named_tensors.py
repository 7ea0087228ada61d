"""The parameters and persistent buffers of a module, by name."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from midstride.engine.metrics.torchmetrics_state import is_metric
from midstride.engine.modules.layers import owner_of
from midstride.engine.modules.torch_internals import buffers_of, parameters_of, transient_buffers

__all__ = ["is_buffer", "named_tensors", "owner_and_attribute", "set_tensor", "shared_names"]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; not those of metrics, nor lazy ones without a shape yet."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, submodule in module.named_modules()
        if not is_metric(submodule)
        for kind in (parameters_of(submodule), buffers_of(submodule))
        for name, tensor in kind.items()
        if tensor is not None and not is_lazy(tensor) and name not in transient_buffers(submodule)
    }


def shared_names(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def owner_and_attribute(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the layer that holds the parameter or buffer `name` of `module`, and the attribute's name there."""
    return module.get_submodule(owner_of(name)), name.rpartition(".")[2]


def is_buffer(module: nn.Module, name: str) -> bool:
    """Return whether `name` is a buffer of `module`."""
    owner, attribute = owner_and_attribute(module, name)
    return attribute in buffers_of(owner)


def set_tensor(module: nn.Module, name: str, value: Any) -> None:
    """Set the buffer or parameter `name` of `module` to `value`."""
    owner, attribute = owner_and_attribute(module, name)
    kind: Any = buffers_of if attribute in buffers_of(owner) else parameters_of
    kind(owner)[attribute] = value
