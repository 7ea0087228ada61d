"""Layers that came up in training: they are described whole, and built again by the next attempt."""

import logging
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names
from midstride.engine.metrics.torchmetrics_internals import begin_anew, without_seen
from midstride.engine.modules.layers import layers_of, own_layers, owner_of, set_layer
from midstride.engine.modules.torch_internals import children_of
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.roots import module_anchors
from midstride.engine.objects.user_modules import function_called
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.objects.watch import shown
from midstride.engine.state.object_nodes import Instance

__all__ = ["NewLayers"]

log = logging.getLogger(__name__)


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
        """Return a node for each topmost new layer of `layers`, by path; warn once of what a node cannot hold."""
        paths = [path for path in layers if path not in self._built and owner_of(path) in self._built]
        if not paths:
            return {}
        walk = self._walk()
        nodes = {path: walk.node(layers[path], f"structure/{path}") for path in paths}
        if lost := [path for path in [*walk.opaque, *_lost_constants(walk)] if path not in self._reported]:
            self._reported.update(lost)
            log.warning(
                "%s came up in training and holds what no snapshot can (%s): a resumed run could not build it again. "
                "Make it in __init__",
                ", ".join(paths),
                ", ".join(lost[:3]),
            )
        for node in nodes.values():
            _drop_separate_state(node)
        return nodes

    def _walk(self) -> GraphWalk:
        """Return a walk whose anchors are the modules and tensors that were built."""
        anchors = {name: value for name, value in module_anchors(self._module).items() if self._is_built(name, value)}
        tensors = {name: value for name, value in anchors.items() if isinstance(value, Tensor)}
        return GraphWalk({id(value): name for name, value in anchors.items()}, tensors)

    def _is_built(self, name: str, value: object) -> bool:
        kind, _, path = name.partition(" ")
        return (path if kind == "module" else owner_of(path)) in self._built

    def rebuild(self, nodes: dict[str, Any]) -> None:
        """Build the layers of `nodes`, except those that the module has; the values of their tensors are loaded later.

        Raises:
            UserError: a layer cannot be built as it was.
        """
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
