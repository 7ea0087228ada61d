"""The forms of a module's parameters and buffers, and how they change in training."""

from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.errors import UserError
from midstride.engine.modules.named_tensors import named_tensors, owner_and_attribute
from midstride.engine.modules.torch_internals import buffers_of, transient_buffers
from midstride.engine.state.row_shards import distributed_tensor, is_distributed, shard_rows, shards_of

__all__ = ["TensorForms"]


class TensorForms:
    """The kind (parameter or buffer), shape, dtype and strides of each tensor of a module as it was built.

    Args:
        module: as it was built.
        device: where new tensors are made, unless they were on the host.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._built = {name: _form(tensor) for name, tensor in named_tensors(module).items()}

    def changed(self, tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Return the forms of those `tensors` that are new or have another form than they were built with."""
        changed = {name: tensor for name, tensor in tensors.items() if self._built.get(name) != _form(tensor)}
        return {name: self._described(tensor) for name, tensor in changed.items()}

    def removed(self, tensors: dict[str, Tensor], layers: dict[str, nn.Module]) -> dict[str, str]:
        """Return what became of the persistent buffers that were built and are not in `tensors`.

        Args:
            tensors: the parameters and buffers of today, by name.
            layers: the layers of today, by path.

        Returns:
            for each buffer whose layer is still there: "transient" (not persistent now), "none", or "away" (deleted).

        Raises:
            UserError: a parameter was removed: the next attempt could not match it to its optimizer state.
        """
        parameters = [name for name, form in self._built.items() if form[0] == "parameter"]
        if gone := [name for name in parameters if not isinstance(tensors.get(name), nn.Parameter)]:
            now = "a buffer now" if gone[0] in tensors else "gone"
            raise UserError(
                f"the parameter {gone[0]} was there when training began and is {now}: no other attempt can take its "
                "optimizer's state to where it went. Change the module's parameters (pruning, parametrizations, "
                "replaced layers) in __init__, setup or on_fit_start, which every attempt calls."
            )
        buffers = [name for name, form in self._built.items() if form[0] == "buffer" and name not in tensors]
        return {name: self._removed_as(name) for name in buffers if name.rpartition(".")[0] in layers}

    def _removed_as(self, name: str) -> str:
        owner, attribute = owner_and_attribute(self._module, name)
        if attribute not in buffers_of(owner):
            return "away"
        return "transient" if attribute in transient_buffers(owner) else "none"

    def remove(self, name: str, removed_as: str) -> None:
        """Remove the buffer `name`, in the way that `removed` told."""
        owner, attribute = owner_and_attribute(self._module, name)
        if removed_as == "away":
            buffers_of(owner).pop(attribute, None)
        elif removed_as == "transient":  # NonPersistentBuffers restores its value later
            buffers_of(owner).setdefault(attribute, None)
            transient_buffers(owner).add(attribute)
        else:
            buffers_of(owner)[attribute] = None

    def change(self, name: str, form: dict[str, Any]) -> None:
        """Replace the tensor `name` by zeros of the `form` that `changed` told, unless it has that form already."""
        owner, attribute = owner_and_attribute(self._module, name)
        value = self._zeros(form)
        tensor = named_tensors(self._module).get(name)
        if tensor is not None and _form(tensor) == _form(value, form["kind"]):
            return
        if form["kind"] == "buffer":
            buffers_of(owner)[attribute] = value
            transient_buffers(owner).discard(attribute)
        elif isinstance(tensor, nn.Parameter):
            tensor.data = value
        else:
            buffers_of(owner).pop(attribute, None)
            vars(owner).pop(attribute, None)  # a plain attribute of that name, such as None
            owner.register_parameter(attribute, nn.Parameter(value, requires_grad=form["requires_grad"]))

    def _described(self, tensor: Tensor) -> dict[str, Any]:
        kind, shape, dtype, strides, is_cut = _form(tensor)
        form = {"kind": kind, "shape": list(shape), "dtype": dtype, "requires_grad": tensor.requires_grad}
        if strides is not None:
            form["strides"] = list(strides)
        if tensor.is_cpu and self._device.type != "cpu":
            form["on_host"] = True
        if is_cut:
            form["cut"] = True
        return form

    def _zeros(self, form: dict[str, Any]) -> Tensor:
        device = "cpu" if form.get("on_host") else self._device
        value = torch.zeros(form["shape"], dtype=form["dtype"], device=device)
        if "strides" in form:
            value = value.new_empty_strided(form["shape"], form["strides"]).zero_()
        if form.get("cut"):
            like = next(filter(is_distributed, self._module.parameters()))
            value = distributed_tensor(shard_rows(value, *shards_of(like)), like)
        return value


def _form(tensor: Tensor, kind: str = "") -> tuple[Any, ...]:
    """Return kind ("parameter" or "buffer"), shape, dtype, strides and whether it is distributed."""
    kind = kind or ("parameter" if isinstance(tensor, nn.Parameter) else "buffer")
    return kind, tensor.shape, tensor.dtype, _strides(tensor), is_distributed(tensor)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of `tensor`; None if it is contiguous, expanded, or has no strides."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or 0 in tensor.stride():
        return None
    return tensor.stride()
