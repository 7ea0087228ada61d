"""What a module has come to consist of since it was built: layers, parameters and buffers that came up in training."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names
from midstride.engine.metrics.torchmetrics_internals import begin_anew, without_seen
from midstride.engine.metrics.torchmetrics_state import is_metric
from midstride.engine.modules.layers import change_layers, layer_changes, layers_of, own_layers, owner_of, set_layer
from midstride.engine.modules.torch_internals import buffers_of, children_of, parameters_of, transient_buffers
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.distributed_tensors import reshard_nodes
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.graph_restore import GraphRestore
from midstride.engine.objects.roots import module_anchors
from midstride.engine.objects.unwritable import shown
from midstride.engine.objects.user_modules import function_called
from midstride.engine.state.nodes import Instance
from midstride.engine.state.row_shards import distributed_tensor, is_distributed, shard_rows, shards_of
from midstride.engine.state.tensors import is_expanded

__all__ = ["ModuleStructure"]

log = logging.getLogger(__name__)


class ModuleStructure:
    """How the layers, parameters and buffers of a module differ from those that every attempt builds.

    It is restored before the weights, which are then loaded into the changed structure.

    Args:
        module: as it was built.
        device: where new tensors are made, unless they were on the host.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        tensors = _tensors(module)
        self._forms = {name: _form(tensor) for name, tensor in tensors.items()}
        self._layers = layers_of(module)
        self._modules = own_layers(self._layers)
        self._same = _same(tensors)
        self._reported: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return what was added, removed, shared, or changed in shape, dtype or layout; empty if all is as built.

        Raises:
            UserError: a parameter was removed or tied: the next attempt could not match it to its optimizer state.
        """
        modules = dict(self._module.named_modules())
        new = [path for path in modules if path not in self._modules and owner_of(path) in self._modules]
        state = layer_changes(self._layers, layers_of(self._module))
        if new:
            state["modules"] = self._described({path: modules[path] for path in new})
        found = _tensors(self._module)
        tensors = {name: tensor for name, tensor in found.items() if owner_of(name) in self._modules}
        changed = {name: tensor for name, tensor in tensors.items() if self._forms.get(name) != _form(tensor)}
        if changed:
            state["tensors"] = {name: self._described_tensor(tensor) for name, tensor in changed.items()}
        self._refuse_gone(tensors)
        gone = [name for name, form in self._forms.items() if name not in tensors and form[0] == "buffer"]
        if here := [name for name in gone if owner_of(name) in modules]:
            state["gone buffers"] = {name: self._gone_as(name) for name in here}
        if (same := _same(found)) != self._same:
            self._refuse_tied(same)
            state["shared buffers"] = [names for names in same if self._is_buffer(names[0])]
            groups = [names for names in same if not self._is_buffer(names[0])]
            if groups != self._built_as_one(found):
                state["shared parameters"] = groups
        return state

    def _built_as_one(self, found: dict[str, Tensor]) -> list[list[str]]:
        """Return groups of names of parameters that were tied when the module was built and still exist."""
        still = [[name for name in names if name in found and not self._is_buffer(name)] for names in self._same]
        return [names for names in still if len(names) > 1]

    def _refuse_gone(self, tensors: dict[str, Tensor]) -> None:
        parameters = [name for name, form in self._forms.items() if form[0] == "parameter"]
        if gone := [name for name in parameters if not isinstance(tensors.get(name), nn.Parameter)]:
            now = "a buffer now" if gone[0] in tensors else "gone"
            raise UserError(
                f"the parameter {gone[0]} was there when training began and is {now}: no other attempt can take its "
                "optimizer's state to where it went. Change the module's parameters (pruning, parametrizations, "
                "replaced layers) in __init__, setup or on_fit_start, which every attempt calls."
            )

    def _gone_as(self, name: str) -> str:
        """Return what became of a persistent buffer: "transient" (not persistent), "none", or "away" (deleted)."""
        owner, attribute = self._module.get_submodule(owner_of(name)), name.rpartition(".")[2]
        if attribute not in buffers_of(owner):
            return "away"
        return "transient" if attribute in transient_buffers(owner) else "none"

    def _remove_buffer(self, name: str, gone_as: str) -> None:
        owner, attribute = self._module.get_submodule(owner_of(name)), name.rpartition(".")[2]
        if gone_as == "away":
            buffers_of(owner).pop(attribute, None)
        elif gone_as == "transient":  # NonPersistentBuffers restores its value later
            buffers_of(owner).setdefault(attribute, None)
            transient_buffers(owner).add(attribute)
        else:
            buffers_of(owner)[attribute] = None

    def _refuse_tied(self, same: list[list[str]]) -> None:
        were = [name for names in self._same for name in names[1:]]
        for first, *others in same:
            if tied := [name for name in others if name not in were and not self._is_buffer(name)]:
                raise UserError(
                    f"the parameter {tied[0]} came to be {first} in training: no other attempt could tell them apart. "
                    "Tie weights in __init__, setup or on_fit_start, which every attempt calls."
                )

    def _is_buffer(self, name: str) -> bool:
        return name.rpartition(".")[2] in buffers_of(self._module.get_submodule(owner_of(name)))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Change the module to the structure in `state_dict`; the values of its tensors are loaded later."""
        change_layers(self._module, self._layers, state_dict, partial(self._rebuild, state_dict.get("modules", {})))
        for name, gone_as in state_dict.get("gone buffers", {}).items():
            self._remove_buffer(name, gone_as)
        for name, form in state_dict.get("tensors", {}).items():
            self._reshape(name, form)
        if "shared buffers" in state_dict:
            self._share(state_dict["shared buffers"], buffers=True)
        if "shared parameters" in state_dict:
            self._share(state_dict["shared parameters"], buffers=False)
        self._materialize_expanded()

    def _reshape(self, name: str, form: dict[str, Any]) -> None:
        """Replace the tensor `name` by zeros of the saved `form`, unless it has that form already."""
        owner, attribute = self._module.get_submodule(owner_of(name)), name.rpartition(".")[2]
        device = "cpu" if form.get("on_host") else self._device
        value = torch.zeros(form["shape"], dtype=form["dtype"], device=device)
        if "strides" in form:
            value = value.new_empty_strided(form["shape"], form["strides"]).zero_()
        if form.get("cut"):
            like = next(filter(is_distributed, self._module.parameters()))
            value = distributed_tensor(shard_rows(value, *shards_of(like)), like)
        tensor = _tensors(self._module).get(name)
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

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the state of rank 0, with this rank's rows of distributed tensors."""
        reshard_nodes(states, self._module.parameters())
        return states[0]

    def _share(self, groups: list[list[str]], *, buffers: bool) -> None:
        """Make the buffers, or the parameters, of each group one tensor, and give all others memory of their own."""
        tensors = _tensors(self._module)
        for name in [name for names in _same(tensors) for name in names[1:] if self._is_buffer(name) == buffers]:
            own = tensors[name].detach().clone()
            self._set(name, own if buffers else nn.Parameter(own))
        tensors = _tensors(self._module)
        for first, *others in groups:
            for name in others:
                self._set(name, tensors[first])

    def _materialize_expanded(self) -> None:
        """Replace expanded buffers (strides of 0) by contiguous copies: torch cannot copy values into expanded ones."""
        unfolded: dict[int, Tensor] = {}
        for name, tensor in _tensors(self._module).items():
            if self._is_buffer(name) and is_expanded(tensor):
                value = unfolded.get(id(tensor))
                unfolded[id(tensor)] = value = tensor.contiguous() if value is None else value
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        """Set the buffer or parameter `name` to `value`."""
        kind: Any = buffers_of if self._is_buffer(name) else parameters_of
        kind(self._module.get_submodule(owner_of(name)))[name.rpartition(".")[2]] = value

    def _described(self, modules: dict[str, nn.Module]) -> dict[str, Any]:
        walk = self._walk()
        nodes = {path: walk.node(module, f"structure/{path}") for path, module in modules.items()}
        if lost := [path for path in [*walk.opaque, *_lost_constants(walk)] if path not in self._reported]:
            self._reported.update(lost)
            log.warning(
                "%s came up in training and holds what no snapshot can (%s): a resumed run could not build it again. "
                "Make it in __init__",
                ", ".join(modules),
                ", ".join(lost[:3]),
            )
        for node in nodes.values():
            _drop_separate_state(node)
        return nodes

    def _described_tensor(self, tensor: Tensor) -> dict[str, Any]:
        kind, shape, dtype, strides, is_cut = _form(tensor)
        form = {"kind": kind, "shape": list(shape), "dtype": dtype, "requires_grad": tensor.requires_grad}
        if strides is not None:
            form["strides"] = list(strides)
        if tensor.is_cpu and self._device.type != "cpu":
            form["on_host"] = True
        if is_cut:
            form["cut"] = True
        return form

    def _walk(self) -> GraphWalk:
        """Return a walk whose anchors are the modules and tensors that were built."""
        anchors = {n: v for n, v in module_anchors(self._module).items() if _is_built(n, v, self._modules)}
        tensors = {name: value for name, value in anchors.items() if isinstance(value, Tensor)}
        return GraphWalk({id(value): name for name, value in anchors.items()}, tensors)

    def _rebuild(self, nodes: dict[str, Any]) -> None:
        # one for all nodes: what new modules share is made once
        restore = GraphRestore(GraphWalk({}, {}), module_anchors(self._module), self._device)
        for path, node in nodes.items():
            _drop_separate_state(node)
            owner, name = self._module.get_submodule(owner_of(path)), path.rpartition(".")[2]
            if path in own_layers(layers_of(self._module)):
                continue
            made = restore.put(node, MISSING, f"structure/{path}")
            if not isinstance(made, nn.Module):
                raise UserError(
                    f"the module {path}, a {node.kind}, came up in training, and this attempt cannot build it: its "
                    "class is not to be found. Make it in __init__, or define the class at the top of a file."
                )
            if lost := [
                f"{shown(where.removeprefix('structure/'))} (was {was})" for where, was in restore.stale.items()
            ]:
                raise UserError(
                    f"the module {path} came up in training, and this attempt cannot build it as it was: "
                    f"{format_names(lost)}. Make it in __init__, setup or on_fit_start, which every attempt calls."
                )
            _reset_metrics(made)
            set_layer(owner, name, made)  # its tensors stay where they were restored: on the host or the device


def _lost_constants(walk: GraphWalk) -> list[str]:
    """Return the paths of functions, classes and the like that another attempt cannot find by their names."""
    found = {path for path in walk.functions if function_called(walk.constants[path].partition(" ")[0]) is not None}
    return [path for path in walk.constants if path not in found]


def _drop_separate_state(node: Any) -> None:
    """Drop from `node` what other parts of the state hold: the training mode, and the values of metrics."""
    attributes = node.state.get("attributes", {}) if isinstance(node, Instance) else {}
    if isinstance(children := attributes.get("_modules"), dict):
        node.state["attributes"] = OrderedDict(without_seen(attributes), training=True)
        for child in children.values():
            _drop_separate_state(child)


def _reset_metrics(module: nn.Module) -> None:
    """Give the metrics in a rebuilt module their initial states: `named_modules` fails on a metric without states."""
    begin_anew(module)
    for child in children_of(module).values():
        if child is not None:
            _reset_metrics(child)


def _is_built(name: str, value: object, modules: set[str]) -> bool:
    kind, _, path = name.partition(" ")
    return (path if kind == "module" else owner_of(path)) in modules


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; not those of metrics, nor lazy ones without a shape yet."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, submodule in module.named_modules()
        if not is_metric(submodule)
        for kind in (parameters_of(submodule), buffers_of(submodule))
        for name, tensor in kind.items()
        if tensor is not None and not is_lazy(tensor) and name not in transient_buffers(submodule)
    }


def _same(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _form(tensor: Tensor, kind: str = "") -> tuple[Any, ...]:
    """Return kind ("parameter" or "buffer"), shape, dtype, strides and whether it is distributed."""
    kind = kind or ("parameter" if isinstance(tensor, nn.Parameter) else "buffer")
    return kind, tensor.shape, tensor.dtype, _strides(tensor), is_distributed(tensor)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of `tensor`; None if it is contiguous, expanded, or has no strides."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or 0 in tensor.stride():
        return None
    return tensor.stride()
