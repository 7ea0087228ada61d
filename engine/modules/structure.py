"""Changes of a module's structure by training: layers and tensors added, removed, reshaped.

`ModuleStructure` is a part of the state of a run. Layers are described in `layers`, tensors here.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from midstride.engine.errors import UserError
from midstride.engine.metrics.torchmetrics_state import is_metric
from midstride.engine.modules.layers import (
    IN_EVERY_ATTEMPT,
    NewLayers,
    change_layers,
    layer_changes,
    layers_of,
    own_layers,
    owner_of,
)
from midstride.engine.modules.quantized import is_quantized, load_weights, weights_of
from midstride.engine.modules.torch_internals import buffers_of, parameters_of, transient_buffers
from midstride.engine.objects.kinds.tensors import has_memory
from midstride.engine.state.module_index import Members, ModuleIndex
from midstride.engine.state.object_nodes import View, instances_in
from midstride.engine.state.row_shards import distributed_tensor, is_distributed, shard_rows, shards_of
from midstride.engine.state.tensors import columns_of, is_expanded

__all__ = ["ModuleStructure", "structure_of", "take_weights"]

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
_BUFFERS, _PARAMETERS, _MEMORY = "shared buffers", "shared parameters", "shared memory"


class ModuleStructure:
    """Differences between a module's structure and the structure built by each attempt.

    It is restored before the weights, which are then loaded into the changed structure.

    Args:
        module: as it was built.
        device: where new tensors are made, unless they were on the host.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._index = module, ModuleIndex.of(module)
        members, tensors = self._index.now(), named_tensors(module)
        #: version and forms of the members that were last found to be as built; None if they have no forms
        self._as_built = _version_of(members)
        self._layers = layers_of(module)
        self._built = own_layers(self._layers)
        self._new_layers = NewLayers(module, self._built, device)
        self._forms = TensorForms(module, tensors, device)
        self._shared = SharedTensors(module, tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and layers added, removed, shared or reshaped; empty if all is as built.

        Raises:
            UserError: a parameter was removed or tied: the next attempt could not match it to its optimizer state.
        """
        members = self._index.now()
        now = _version_of(members)
        if now is not None and self._as_built == now:
            return {}
        layers, tensors = members.modules, named_tensors(self._module)
        of_built = {name: tensor for name, tensor in tensors.items() if owner_of(name) in self._built}
        parts = {
            "modules": self._new_layers.describe(layers),
            "tensors": self._forms.changed(of_built),
            "gone buffers": self._forms.removed(of_built, layers),
        }
        found = {name: part for name, part in parts.items() if part}
        state = layer_changes(self._layers, layers_of(self._module)) | found | self._shared.changes(tensors)
        self._as_built = None if state else now
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Change the module to the structure in `state_dict`. Values of tensors are loaded later."""
        if not (state_dict or self.state_dict()):
            self._shared.apply(state_dict)
            return
        rebuild = partial(self._new_layers.rebuild, state_dict.get("modules", {}))
        change_layers(self._module, self._layers, state_dict, rebuild)
        for name, removed_as in state_dict.get("gone buffers", {}).items():
            self._forms.remove(name, removed_as)
        for name, form in state_dict.get("tensors", {}).items():
            self._forms.change(name, form)
        self._shared.apply(state_dict)


def _version_of(members: Members) -> tuple[int, list[tuple[list[Any], ...]]] | None:
    """Return the version of `members`, addresses and forms of tensors; None if some lack them."""
    if not _PLAIN.issuperset(map(type, members.tensors)):
        return None
    try:
        return members.version, columns_of(members.tensors)
    except RuntimeError:  # sparse ones have no strides, and some devices no addresses
        return None


def structure_of(built: ModuleStructure) -> dict[str, Any] | UserError:
    """Return a module's differences from its build, or the error if they cannot be described."""
    try:
        return built.state_dict()
    except UserError as error:
        return error


def take_weights(module: nn.Module, weights: Mapping[str, Tensor], structure: dict[str, Any] | UserError) -> None:
    """Load `weights` of another process into `module`. If needed, change its layers first.

    Args:
        module: as this process built it.
        weights: the state_dict of the module in the other process.
        structure: result of `structure_of` there.

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
    load_weights(module, weights)


def _fits(module: nn.Module, weights: Mapping[str, Any]) -> bool:
    """Return True if `weights` fit `module` by name and shape. Lazy layers take any shape."""
    own: Mapping[str, Any] = weights_of(module) if is_quantized(module) else module.state_dict(keep_vars=True)
    pairs = [(own[name], value) for name, value in weights.items() if isinstance(own.get(name), Tensor)]
    return own.keys() == weights.keys() and all(is_lazy(mine) or mine.shape == value.shape for mine, value in pairs)


class TensorForms:
    """Kind, shape, dtype and strides of each tensor of a module as built.

    Args:
        module: as it was built.
        tensors: its parameters and buffers by name.
        device: where new tensors are made, unless they were on the host.
    """

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._module, self._device = module, device
        self._built = {name: _form(tensor) for name, tensor in tensors.items()}
        self._cut = set[str]()  # names of restored tensors that were distributed, and are whole where no weight is

    def changed(self, tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Return the forms of `tensors` that are new or differ from their build."""
        changed = {name: tensor for name, tensor in tensors.items() if self._built.get(name) != _form(tensor)}
        return {name: self._described(name, tensor) for name, tensor in changed.items()}

    def removed(self, tensors: dict[str, Tensor], layers: dict[str, nn.Module]) -> dict[str, str]:
        """Return how persistent buffers disappeared that were built and are not in `tensors`.

        Args:
            tensors: the parameters and buffers now, by name.
            layers: the layers now, by path.

        Returns:
            for each buffer whose layer is still there: "transient" (not persistent now), "none", or "away" (deleted).

        Raises:
            UserError: a parameter was removed: the next attempt could not match it to its optimizer state.
        """
        parameters = [name for name, form in self._built.items() if form[0] == "parameter"]
        if gone := [name for name in parameters if not isinstance(tensors.get(name), nn.Parameter)]:
            now = "a buffer now" if gone[0] in tensors else "gone"
            raise UserError(
                f"the parameter {gone[0]} existed when training started and is {now}: a resumed run could not match "
                f"its optimizer state to a parameter. Change parameters (pruning, parametrizations, replaced layers) "
                f"{IN_EVERY_ATTEMPT}."
            )
        buffers = [name for name, form in self._built.items() if form[0] == "buffer" and name not in tensors]
        return {name: self._removed_as(name) for name in buffers if name.rpartition(".")[0] in layers}

    def _removed_as(self, name: str) -> str:
        owner, attribute = owner_and_attribute(self._module, name)
        if attribute not in buffers_of(owner):
            return "away"
        return "transient" if attribute in transient_buffers(owner) else "none"

    def remove(self, name: str, removed_as: str) -> None:
        """Remove the buffer `name`, in the way that `removed` returned."""
        owner, attribute = owner_and_attribute(self._module, name)
        if removed_as == "away":
            buffers_of(owner).pop(attribute, None)
        elif removed_as == "transient":  # NonPersistentBuffers restores its value later
            buffers_of(owner).setdefault(attribute, None)
            transient_buffers(owner).add(attribute)
        else:
            buffers_of(owner)[attribute] = None

    def change(self, name: str, form: dict[str, Any]) -> None:
        """Replace the tensor `name` by zeros of the `form` from `changed`, unless it has that form."""
        owner, attribute = owner_and_attribute(self._module, name)
        value = self._zeros(form)
        if form.get("cut"):
            self._cut.add(name)
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

    def _described(self, name: str, tensor: Tensor) -> dict[str, Any]:
        kind, shape, dtype, strides, is_cut = _form(tensor)
        form = {"kind": kind, "shape": list(shape), "dtype": dtype, "requires_grad": tensor.requires_grad}
        if strides is not None:
            form["strides"] = list(strides)
        if tensor.is_cpu and self._device.type != "cpu":
            form["on_host"] = True
        if is_cut or name in self._cut:
            form["cut"] = True
        return form

    def _zeros(self, form: dict[str, Any]) -> Tensor:
        device = "cpu" if form.get("on_host") else self._device
        value = torch.zeros(form["shape"], dtype=form["dtype"], device=device)
        if "strides" in form:
            value = value.new_empty_strided(form["shape"], form["strides"]).zero_()
        if form.get("cut"):
            like = next(filter(is_distributed, self._module.parameters()), None)
            if like is not None:
                value = distributed_tensor(shard_rows(value, *shards_of(like)), like)
        return value


def _form(tensor: Tensor, kind: str = "") -> tuple[Any, ...]:
    """Return kind ("parameter" or "buffer"), shape, dtype, strides, and True if distributed."""
    kind = kind or ("parameter" if isinstance(tensor, nn.Parameter) else "buffer")
    return kind, tensor.shape, tensor.dtype, _strides(tensor), is_distributed(tensor)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of `tensor`; None if it is contiguous, expanded, or has no strides."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or 0 in tensor.stride():
        return None
    return tensor.stride()


class SharedTensors:
    """Parameters and buffers that were one tensor when the module was built.

    Args:
        module: as it was built.
        tensors: its parameters and buffers by name.
    """

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._module = module
        self._built, self._built_memory = shared_names(tensors), views_in(tensors)

    def changes(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return which of `tensors` are one or share memory, if that differs from the build.

        Names of parameters are left out if all that changed is that some of them were removed.

        Raises:
            UserError: a parameter was tied to another: the next attempt could not match it to its optimizer state.
        """
        memory = views_in(tensors)
        changes: dict[str, Any] = {} if memory == self._built_memory else {_MEMORY: memory}
        shared = shared_names(tensors)
        if shared == self._built:
            return changes
        self._refuse_tied(shared)
        changes |= {_BUFFERS: [names for names in shared if self._is_buffer(names[0])]}
        groups = [names for names in shared if not self._is_buffer(names[0])]
        if groups != self._still_tied(tensors):
            changes[_PARAMETERS] = groups
        return changes

    def _still_tied(self, tensors: dict[str, Tensor]) -> list[list[str]]:
        """Return groups of names of existing parameters that were tied when the module was built."""
        still = [[name for name in names if name in tensors and not self._is_buffer(name)] for names in self._built]
        return [names for names in still if len(names) > 1]

    def _refuse_tied(self, shared: list[list[str]]) -> None:
        were = [name for names in self._built for name in names[1:]]
        for first, *others in shared:
            if tied := [name for name in others if name not in were and not self._is_buffer(name)]:
                raise UserError(
                    f"training has tied the parameter {tied[0]} to {first}, which a resumed run could not tell apart. "
                    f"Tie weights {IN_EVERY_ATTEMPT}."
                )

    def apply(self, state: dict[str, Any]) -> None:
        """Share tensors as recorded in `state`, and give expanded buffers their own memory."""
        if _BUFFERS in state:
            self._share(state[_BUFFERS], buffers=True)
        if _PARAMETERS in state:
            self._share(state[_PARAMETERS], buffers=False)
        self._materialize_expanded()
        if _MEMORY in state:
            self._share_memory(state[_MEMORY])

    def _share_memory(self, views: dict[str, View]) -> None:
        """Put tensors into the memory of others, as `views` say; give all others their own."""
        tensors = named_tensors(self._module)
        for name, view in views_in(tensors).items():
            tensor = tensors[name]
            if views.get(name) != view:
                tensor.data = tensor.detach().clone()
        for name, view in views.items():
            tensor, base = tensors[name], tensors[view.of].detach()
            tensor.data = base.as_strided(view.shape, view.strides, base.storage_offset() + view.offset)

    def _share(self, groups: list[list[str]], *, buffers: bool) -> None:
        """Make the tensors of each group one, and give all others their own memory."""
        tensors = named_tensors(self._module)
        for name in [name for names in shared_names(tensors) for name in names[1:] if self._is_buffer(name) == buffers]:
            own = tensors[name].detach().clone()
            set_tensor(self._module, name, own if buffers else nn.Parameter(own))
        tensors = named_tensors(self._module)
        for first, *others in groups:
            for name in others:
                set_tensor(self._module, name, tensors[first])

    def _materialize_expanded(self) -> None:
        """Replace expanded buffers (strides of 0) by contiguous copies, which torch can write to."""
        copies: dict[int, Tensor] = {}
        for name, tensor in named_tensors(self._module).items():
            if is_expanded(tensor) and self._is_buffer(name):
                if id(tensor) not in copies:
                    copies[id(tensor)] = tensor.contiguous()
                set_tensor(self._module, name, copies[id(tensor)])

    def _is_buffer(self, name: str) -> bool:
        return is_buffer(self._module, name)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, without metrics and lazy tensors."""
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


def views_in(tensors: dict[str, Tensor]) -> dict[str, View]:
    """Return, by name, the tensors that lie in the memory of another one, as views of it.

    >>> one = torch.zeros(4)
    >>> views_in({"one": one, "two": one[2:], "three": torch.zeros(4)})
    {'two': View(of='one', shape=(2,), strides=(1,), offset=2, dtype='')}
    """
    known = {id(tensor): name for name, tensor in reversed(tensors.items()) if has_memory(tensor)}
    order = enumerate(known.values())  # from the last to the first
    spans = sorted((tensors[name].data_ptr(), -_end(tensors[name]), -at, name) for at, name in order)
    views: dict[str, View] = {}
    base, base_start, base_end = "", 0, 0
    for start, end, _, name in spans:
        if start >= base_end:
            base, base_start, base_end = name, start, -end
            continue
        tensor, further = tensors[name], start - base_start
        size = tensor.element_size()
        if -end <= base_end and tensor.dtype == tensors[base].dtype and further % size == 0:
            views[name] = View(base, tuple(tensor.shape), tensor.stride(), further // size)
    return views


def _end(tensor: Tensor) -> int:
    """Return the address at which the memory of a tensor ends."""
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (steps + 1) * tensor.element_size()


def owner_and_attribute(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the layer with the parameter or buffer `name`, and the attribute's name there."""
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
