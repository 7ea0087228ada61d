"""Objects that classes add to a module's state_dict, such as their own arguments."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from midstride.engine.objects.kinds.tensors import tensors_in
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.roots import module_anchors
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.codec import is_writable
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.object_nodes import Instance, kind_name

__all__ = ["described", "objects_in", "restored"]

_FORM = "entry"
_WEIGHTS = frozenset({Tensor, nn.Parameter, nn.Buffer})


def described(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the `state` of `module` with nodes in place of objects that the codec cannot write."""
    if _WEIGHTS.issuperset(map(type, state.values())):  # most often, and at each snapshot
        return state
    objects = {name: it for name, it in state.items() if not isinstance(it, Tensor) and not is_writable(it)}
    if not objects:
        return state
    nodes: dict[str, Any] = {}
    new_walk = _walks(module_anchors(ModuleIndex.of(module).now()))
    for name, value in objects.items():
        walk = new_walk()
        node = walk.node(value, name)
        if not walk.opaque:  # else the codec refuses it, by its path
            nodes[name] = Instance(_FORM, kind_name(type(value)), {"of": node})
    return {**state, **nodes}


def objects_in(weights: Mapping[str, Any]) -> dict[str, Instance]:
    """Return the nodes of `described` in `weights`, by name."""
    return {name: node for name, node in weights.items() if isinstance(node, Instance) and node.form == _FORM}


def restored(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `weights` with objects in place of nodes.

    Containers are copies: user code may empty what it loads, as by `pop`, and the weights are compared afterwards.
    """
    nodes = objects_in(weights)
    extra = {name: value for name, value in weights.items() if isinstance(value, (dict, list, set))}
    if not nodes and not extra:
        return weights
    given = cast("dict[str, Any]", copy.copy(cast("Any", weights)))  # with `_metadata`, if it has that
    given.update(copy.deepcopy(extra, {id(tensor): tensor for tensor in tensors_in(extra)}))
    own = module.state_dict() if nodes else {}
    anchors = module_anchors(ModuleIndex.of(module).now())
    new_walk = _walks(anchors)
    for name, node in nodes.items():
        walk = new_walk()
        walk.node(own.get(name), name)
        given[name] = GraphRestore(walk, anchors, torch.device("cpu")).value(node.state["of"], own.get(name), name)
    return given


def _walks(anchors: Mapping[str, object]) -> Callable[[], GraphWalk]:
    """Return what makes walks, in which the module's layers and tensors are known."""
    tensors = {name: value for name, value in anchors.items() if isinstance(value, Tensor)}
    return partial(GraphWalk, {id(value): name for name, value in anchors.items()}, tensors)
