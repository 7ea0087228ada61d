"""Accelerator tensors in states that user code returns: marked in snapshots, and moved back to the device on resume."""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from midstride.engine.objects.containers import leaf_like
from midstride.engine.objects.plain_values import kind_name
from midstride.engine.objects.restored_memory import RestoredMemory
from midstride.engine.state.object_nodes import Instance, instances_in
from midstride.engine.state.tensors import other_kind

__all__ = ["mark_device_tensors", "place_device_tensors", "placed_tensors", "tensors_in"]

_FORM = "on device"


def mark_device_tensors(tree: Any) -> Any:
    """Return `tree` with a node in place of each tensor on an accelerator; the tree itself if it has none."""
    tensors = list(tensors_in(tree))
    marks = {id(tensor): _mark(tensor) for tensor in tensors if _is_on_device(tensor)}
    return copy.deepcopy(tree, {id(tensor): tensor for tensor in tensors} | marks) if marks else tree


def place_device_tensors(tree: Any, device: torch.device) -> Any:
    """Return `tree` with tensors on `device` in place of the nodes; the tree itself if it has none.

    Tensors that are on `device` already are not copied, as when a state is loaded in the process that returned it.
    """
    placed = placed_tensors(tree, device)
    return copy.deepcopy(tree, {id(tensor): tensor for tensor in tensors_in(tree)} | placed) if placed else tree


def placed_tensors(tree: Any, device: torch.device) -> dict[int, Any]:
    """Return the tensors on `device` for the nodes in `tree`, by the ids of the nodes, as a memo of `copy.deepcopy`."""
    memory, placed = RestoredMemory(device), dict[int, Any]()
    for _, node in instances_in(tree, _FORM):
        value: Tensor = node.state["value"]
        if id(node) not in placed:
            placed[id(node)] = leaf_like(value, memory.place(value.detach(), was_on_host=False))
    return placed


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree of state; skips lists of plain numbers, such as the state of `random`."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, Instance)):
        for value in (tree.state if isinstance(tree, Instance) else tree).values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple, deque)) and any(type(item) not in (int, float, str) for item in tree):
        for value in tree:
            yield from tensors_in(value)


def _is_on_device(tensor: Tensor) -> bool:
    """Return whether `tensor` is on an accelerator, and of a kind that snapshots hold; others are refused later."""
    return tensor.device.type != "cpu" and tensor.grad_fn is None and other_kind(tensor) is None


def _mark(tensor: Tensor) -> Instance:
    return Instance(_FORM, kind_name(type(tensor)), {"value": tensor})
