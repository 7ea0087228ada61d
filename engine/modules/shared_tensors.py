"""Parameters and buffers of a module that are one tensor under several names, and how that changes in training."""

from typing import Any

from torch import Tensor, nn

from midstride.engine.errors import UserError
from midstride.engine.modules.named_tensors import is_buffer, named_tensors, set_tensor, shared_names
from midstride.engine.state.tensors import is_expanded

__all__ = ["SharedTensors"]

_BUFFERS, _PARAMETERS = "shared buffers", "shared parameters"


class SharedTensors:
    """Which parameters and buffers were one tensor when the module was built.

    Args:
        module: as it was built.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._built = shared_names(named_tensors(module))

    def changes(self, tensors: dict[str, Tensor]) -> dict[str, list[list[str]]]:
        """Return the names of each shared one of `tensors`, if others are shared than when the module was built.

        Names of parameters are left out if all that changed is that some of them were removed.

        Raises:
            UserError: a parameter was tied to another: the next attempt could not match it to its optimizer state.
        """
        shared = shared_names(tensors)
        if shared == self._built:
            return {}
        self._refuse_tied(shared)
        changes = {_BUFFERS: [names for names in shared if self._is_buffer(names[0])]}
        groups = [names for names in shared if not self._is_buffer(names[0])]
        if groups != self._still_tied(tensors):
            changes[_PARAMETERS] = groups
        return changes

    def _still_tied(self, tensors: dict[str, Tensor]) -> list[list[str]]:
        """Return groups of names of parameters that were tied when the module was built and still exist."""
        still = [[name for name in names if name in tensors and not self._is_buffer(name)] for names in self._built]
        return [names for names in still if len(names) > 1]

    def _refuse_tied(self, shared: list[list[str]]) -> None:
        were = [name for names in self._built for name in names[1:]]
        for first, *others in shared:
            if tied := [name for name in others if name not in were and not self._is_buffer(name)]:
                raise UserError(
                    f"the parameter {tied[0]} came to be {first} in training: no other attempt could tell them apart. "
                    "Tie weights in __init__, setup or on_fit_start, which every attempt calls."
                )

    def apply(self, state: dict[str, Any]) -> None:
        """Share tensors as the changes in `state` say, and give expanded buffers memory of their own."""
        if _BUFFERS in state:
            self._share(state[_BUFFERS], buffers=True)
        if _PARAMETERS in state:
            self._share(state[_PARAMETERS], buffers=False)
        self._materialize_expanded()

    def _share(self, groups: list[list[str]], *, buffers: bool) -> None:
        """Make the buffers, or the parameters, of each group one tensor, and give all others memory of their own."""
        tensors = named_tensors(self._module)
        for name in [name for names in shared_names(tensors) for name in names[1:] if self._is_buffer(name) == buffers]:
            own = tensors[name].detach().clone()
            set_tensor(self._module, name, own if buffers else nn.Parameter(own))
        tensors = named_tensors(self._module)
        for first, *others in groups:
            for name in others:
                set_tensor(self._module, name, tensors[first])

    def _materialize_expanded(self) -> None:
        """Replace expanded buffers (strides of 0) by contiguous copies: torch cannot copy values into expanded ones."""
        copies: dict[int, Tensor] = {}
        for name, tensor in named_tensors(self._module).items():
            if self._is_buffer(name) and is_expanded(tensor):
                if id(tensor) not in copies:
                    copies[id(tensor)] = tensor.contiguous()
                set_tensor(self._module, name, copies[id(tensor)])

    def _is_buffer(self, name: str) -> bool:
        return is_buffer(self._module, name)
