"""What a module has come to consist of since it was built: layers, parameters and buffers that came up in training."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from midstride.engine.modules.layers import change_layers, layer_changes, layers_of, own_layers, owner_of
from midstride.engine.modules.named_tensors import named_tensors
from midstride.engine.modules.new_layers import NewLayers
from midstride.engine.modules.shared_tensors import SharedTensors
from midstride.engine.modules.tensor_forms import TensorForms
from midstride.engine.objects.kinds.tensors import reshard_nodes

__all__ = ["ModuleStructure"]


class ModuleStructure:
    """How the layers, parameters and buffers of a module differ from those that every attempt builds.

    It is restored before the weights, which are then loaded into the changed structure.

    Args:
        module: as it was built.
        device: where new tensors are made, unless they were on the host.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._layers = layers_of(module)
        self._built = own_layers(self._layers)
        self._new_layers = NewLayers(module, self._built, device)
        self._forms = TensorForms(module, device)
        self._shared = SharedTensors(module)

    def state_dict(self) -> dict[str, Any]:
        """Return what was added, removed, shared, or changed in shape, dtype or layout; empty if all is as built.

        Raises:
            UserError: a parameter was removed or tied: the next attempt could not match it to its optimizer state.
        """
        layers, tensors = dict(self._module.named_modules()), named_tensors(self._module)
        of_built = {name: tensor for name, tensor in tensors.items() if owner_of(name) in self._built}
        parts = {
            "modules": self._new_layers.describe(layers),
            "tensors": self._forms.changed(of_built),
            "gone buffers": self._forms.removed(of_built, layers),
        }
        found = {name: part for name, part in parts.items() if part}
        return layer_changes(self._layers, layers_of(self._module)) | found | self._shared.changes(tensors)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Change the module to the structure in `state_dict`; the values of its tensors are loaded later."""
        rebuild = partial(self._new_layers.rebuild, state_dict.get("modules", {}))
        change_layers(self._module, self._layers, state_dict, rebuild)
        for name, removed_as in state_dict.get("gone buffers", {}).items():
            self._forms.remove(name, removed_as)
        for name, form in state_dict.get("tensors", {}).items():
            self._forms.change(name, form)
        self._shared.apply(state_dict)

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the state of rank 0, with this rank's rows of distributed tensors."""
        reshard_nodes(states, self._module.parameters())
        return states[0]
