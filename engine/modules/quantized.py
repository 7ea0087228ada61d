"""Weights that libraries have quantized: tensors of their own classes, made of plain ones.

`Module.load_state_dict` cannot take them all back. Each attempt quantizes in the same way, so the plain tensors of a
snapshot are copied into those that the module has.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from midstride.engine.errors import NotExact
from midstride.engine.modules.state_entries import described, objects_in, restored
from midstride.engine.modules.torch_internals import keeps_state_as_torch, load_state_dict
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.row_shards import is_distributed

__all__ = ["ModuleWeights", "is_quantized", "load_weights", "weights_of"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class ModuleWeights:
    """The weights of a module, as a part of a state."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def is_library_code(self) -> bool:
        """Whether torch alone saves and loads the weights, without code of the user's."""
        members = ModuleIndex.of(self._module).now()
        tensors = members.tensors
        are_plain = {*map(type, tensors)}.issubset(_PLAIN) and {tensor.layout for tensor in tensors} <= {torch.strided}
        # Torch refuses to copy to elements that share memory, and to inference tensors.
        has_places = are_plain and all(tensor.is_contiguous() and not tensor.is_inference() for tensor in tensors)
        return has_places and keeps_state_as_torch(members.modules.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        state = self._module.state_dict()
        return dict(_plain_tensors(state)) if is_quantized(self._module) else described(self._module, state)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the weights."""
        load_weights(self._module, state_dict)


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict of a module, with plain tensors in place of quantized ones."""
    state = module.state_dict()
    return dict(_plain_tensors(state)) if is_quantized(module) else state


def load_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load the result of `weights_of`, in place.

    Raises:
        NotExact: the module is quantized otherwise.
    """
    if not is_quantized(module):
        load_state_dict(module, restored(module, weights), made=objects_in(weights).keys())
        return
    own = dict(_plain_tensors(module.state_dict()))
    if names := sorted(own.keys() ^ weights.keys()):
        found = ", ".join(names[:5])
        raise NotExact(f"the module's weights are quantized differently from those of the snapshot: {found}")
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)


def is_quantized(module: nn.Module) -> bool:
    """Return whether parameters or buffers of `module` are of classes of their own."""
    tensors = ModuleIndex.of(module).now().tensors
    if {*map(type, tensors)}.issubset(_PLAIN):  # many, at each snapshot
        return False
    others = (one for one in tensors if type(one) not in _PLAIN)
    return any(not is_lazy(one) and not is_distributed(one) for one in others)


def _plain_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if not isinstance(value, Tensor) or type(value) in _PLAIN:
            yield name, value
        elif hasattr(value, "__tensor_flatten__"):
            inner: Any = value
            parts, _ = inner.__tensor_flatten__()
            yield from _plain_tensors({f"{name}.{part}": getattr(value, part).detach() for part in parts})
        else:
            yield name, value.detach().as_subclass(Tensor)
