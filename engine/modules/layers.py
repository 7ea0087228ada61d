"""Layers of a module by path, and their changes in training: removed, shared, reordered."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names
from midstride.engine.metrics.torchmetrics_internals import begin_anew, without_seen
from midstride.engine.modules.torch_internals import children_of
from midstride.engine.objects.classes import class_called
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.roots import module_anchors
from midstride.engine.objects.user_modules import function_called
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.objects.watch import shown
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.object_nodes import Instance

__all__ = [
    "IN_EVERY_ATTEMPT",
    "Layers",
    "NewLayers",
    "change_layers",
    "layer_changes",
    "layers_of",
    "own_layers",
    "owner_of",
    "set_layer",
]

log = logging.getLogger(__name__)

#: places of code that each attempt runs, for messages
IN_EVERY_ATTEMPT = "in __init__, setup or on_fit_start, or in a loop of your own before its first epochs() or steps()"
#: path of each child of each module -> the first path of that layer in `named_modules()`; None where the child is None
Layers = Mapping[str, str | None]

_GONE, _SAME, _ORDER = "gone layers", "same layers", "order of layers"


def layers_of(module: nn.Module) -> dict[str, str | None]:
    """Return the layers of `module`, with `module` itself as `""`.

    A layer that is shared is listed under each of its paths, its children only under the first.
    """
    owners = dict(module.named_modules())
    first = {id(layer): path for path, layer in owners.items()}
    layers: dict[str, str | None] = {"": ""}
    for path, owner in owners.items():
        for name, child in children_of(owner).items():
            if child is None or id(child) in first:
                layers[_path(path, name)] = None if child is None else first[id(child)]
    return layers


def own_layers(layers: Layers) -> set[str]:
    """Return the first path of each layer."""
    return {path for path, first in layers.items() if path == first}


def layer_changes(built: Layers, now: Layers) -> dict[str, Any]:
    """Return the differences between the layers `now` and `built`, except new layers.

    Keys without an entry are left out:
        "gone layers": path -> whether the child is None now (else its name is gone), for the topmost removed layers.
        "same layers": path -> first path of the layer that it shares now.
        "order of layers": path of a module -> the names of its children, where their order differs.
    """
    both = own_layers(built) & own_layers(now)
    emptied = [path for path, first in now.items() if first is None and built.get(path, path) is not None]
    away = [path for path in built if path not in now]
    found = {
        _GONE: {path: path in now for path in [*emptied, *away] if owner_of(path) in both},
        _SAME: {path: first for path, first in now.items() if first is not None and _is_other(path, built, now)},
        _ORDER: {owner: names for owner, names in _other_order(built, now).items() if owner in both},
    }
    return {name: value for name, value in found.items() if value}


def change_layers(module: nn.Module, built: Layers, state: dict[str, Any], rebuild: Callable[[], None]) -> None:
    """Apply the changes in `state`, as `layer_changes` returned them, to the layers of `module`.

    `state` is updated to the changes that hold afterwards: the code can build other layers than before.

    Args:
        module: as this attempt built it.
        built: its layers by then.
        state: of the module's structure.
        rebuild: adds the layers that are new.
    """
    _remove_layers(module, state.get(_GONE, {}))
    rebuild()
    _share_layers(module, state.get(_SAME, {}))
    _reorder_layers(module, state.get(_ORDER, {}))
    for name in (_GONE, _SAME, _ORDER):
        state.pop(name, None)
    state.update(layer_changes(built, layers_of(module)))


def _remove_layers(module: nn.Module, gone: Mapping[str, bool]) -> None:
    """Set the layers in `gone` to None where the value is True. Delete the others."""
    for path, is_none in gone.items():
        owner, name = dict(module.named_modules()).get(owner_of(path)), path.rpartition(".")[2]
        if owner is not None and is_none:
            set_layer(owner, name, None)
        elif owner is not None:  # a layer that the code no longer builds is gone, too
            children_of(owner).pop(name, None)


def _share_layers(module: nn.Module, same: Mapping[str, str]) -> None:
    """Set each path in `same` to the layer at the path that it maps to."""
    for path, first in same.items():
        set_layer(module.get_submodule(owner_of(path)), path.rpartition(".")[2], module.get_submodule(first))


def _reorder_layers(module: nn.Module, order: Mapping[str, list[str]]) -> None:
    """Reorder the children of each module in `order` by the names listed for it."""
    layers = dict(module.named_modules())
    for owner in order.keys() & layers.keys():
        children = children_of(layers[owner])
        for name in [name for name in order[owner] if name in children]:
            children[name] = children.pop(name)


def set_layer(owner: nn.Module, name: str, layer: nn.Module | None) -> None:
    """Set a child of `owner`, in place of a plain attribute of that name."""
    vars(owner).pop(name, None)
    children_of(owner)[name] = layer


def _is_other(path: str, built: Layers, now: Layers) -> bool:
    return now[path] not in (path, built.get(path))


def _other_order(built: Layers, now: Layers) -> dict[str, list[str]]:
    """Return by module the names of its reordered children, new ones last."""
    expected = {owner: [name for name in names if _path(owner, name) in now] for owner, names in _names(built).items()}
    for path in now:
        if path not in built and now[path] == path:
            expected.setdefault(owner_of(path), []).append(path.rpartition(".")[2])
    return {owner: names for owner, names in _names(now).items() if names != expected.get(owner)}


def _names(layers: Layers) -> dict[str, list[str]]:
    """Return, by module, the names of its children, in their order."""
    names: dict[str, list[str]] = {}
    for path in list(layers)[1:]:
        names.setdefault(owner_of(path), []).append(path.rpartition(".")[2])
    return names


def _path(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def owner_of(path: str) -> str:
    """Return the path of the layer that holds the child, parameter or buffer at `path`."""
    return path.rpartition(".")[0]


class NewLayers:
    """The layers of a module that every attempt builds, and those that are new since.

    Args:
        module: as it was built.
        built: the paths of its layers by then.
        device: where new tensors are made, unless they were on the host.
    """

    def __init__(self, module: nn.Module, built: set[str], device: torch.device) -> None:
        self._module, self._built, self._device = module, built, device
        self._reported: set[str] = set()

    def describe(self, layers: dict[str, nn.Module]) -> dict[str, Any]:
        """Return a node for each topmost new layer. Warn once of state that a node cannot hold."""
        paths = [path for path in layers if path not in self._built and owner_of(path) in self._built]
        if not paths:
            return {}
        walk = self._walk()
        nodes = {path: walk.node(layers[path], f"structure/{path}") for path in paths}
        if lost := [path for path in [*walk.opaque, *_lost_constants(walk)] if path not in self._reported]:
            self._reported.update(lost)
            log.warning(
                "%s was created in training and holds objects that no snapshot can hold (%s): create it in __init__. "
                "A resumed run could not build it",
                ", ".join(paths),
                ", ".join(lost[:3]),
            )
        for node in nodes.values():
            _drop_separate_state(node)
        return nodes

    def _walk(self) -> GraphWalk:
        """Return a walk whose anchors are the modules and tensors that were built."""
        anchors = {
            name: value
            for name, value in module_anchors(ModuleIndex.of(self._module).now()).items()
            if self._is_built(name, value)
        }
        tensors = {name: value for name, value in anchors.items() if isinstance(value, Tensor)}
        return GraphWalk({id(value): name for name, value in anchors.items()}, tensors)

    def _is_built(self, name: str, value: object) -> bool:
        kind, _, path = name.partition(" ")
        return (path if kind == "module" else owner_of(path)) in self._built

    def rebuild(self, nodes: dict[str, Any]) -> None:
        """Build the missing layers of `nodes`. The values of their tensors are loaded later.

        Raises:
            UserError: a layer cannot be built as it was.
        """
        # one for all nodes: shared parts of new modules are built once
        restore = GraphRestore(GraphWalk({}, {}), module_anchors(ModuleIndex.of(self._module).now()), self._device)
        for path, node in nodes.items():
            _drop_separate_state(node)
            owner, name = self._module.get_submodule(owner_of(path)), path.rpartition(".")[2]
            if path in own_layers(layers_of(self._module)):
                continue
            if class_called(node.kind, MISSING, nn.Module) is None:
                raise UserError(
                    f"the module {path} was created in training, and its class {node.kind} cannot be found: "
                    "create it in __init__, or define the class at the top of a file."
                )
            made = restore.value(node, MISSING, f"structure/{path}")
            lost = [f"{shown(where.removeprefix('structure/'))} (was {was})" for where, was in restore.stale.items()]
            if lost or not isinstance(made, nn.Module):
                raise UserError(
                    f"the module {path} was created in training, and this attempt cannot rebuild it: "
                    f"{format_names(lost)}. Make it {IN_EVERY_ATTEMPT}."
                )
            _reset_metrics(made)
            set_layer(owner, name, made)  # its tensors stay where they were restored: on the host or the device


def _lost_constants(walk: GraphWalk) -> list[str]:
    """Return paths of functions, classes and constants that another attempt cannot find by name."""
    found = {path for path in walk.functions if function_called(walk.constants[path].partition(" ")[0]) is not None}
    return [path for path in walk.constants if path not in found]


def _drop_separate_state(node: Any) -> None:
    """Drop training mode and values of metrics from `node`, because other parts hold them."""
    attributes = node.state.get("attributes", {}) if isinstance(node, Instance) else {}
    if isinstance(children := attributes.get("_modules"), dict):
        node.state["attributes"] = OrderedDict(without_seen(attributes), training=True)
        for child in children.values():
            _drop_separate_state(child)


def _reset_metrics(module: nn.Module) -> None:
    """Give metrics in a rebuilt module their initial states, which `named_modules` requires."""
    begin_anew(module)
    for child in children_of(module).values():
        if child is not None:
            _reset_metrics(child)
