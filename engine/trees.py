"""Nests of containers: batches of any kind moved and rebuilt, trees of state mapped leaf by leaf."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["convert", "items_of", "map_leaves", "move", "rebuilt", "samples_in"]


def move(batch: Any, device: torch.device) -> Any:
    """Return `batch` on `device`; on the CPU there is nothing to move."""
    if device.type == "cpu":
        return batch
    return convert(batch, lambda tensor: tensor.to(device, non_blocking=True), lambda other: other.to(device))


def convert(
    batch: Any, change: Callable[[Tensor], Tensor], change_other: Callable[[Any], Any] = lambda other: other
) -> Any:
    """Return `batch` with every tensor in it changed: in dicts, lists, tuples and dataclasses.

    Args:
        batch: any nest of them; what is none of them stays.
        change: of a tensor.
        change_other: of anything else that has `.to`.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if (items := items_of(batch)) is not None:
        return rebuilt(batch, [convert(item, change, change_other) for item in items])
    return change_other(batch) if hasattr(batch, "to") else batch


def items_of(batch: Any) -> list[Any] | None:
    """Return what is directly in `batch`; None if it is no dict, list, tuple or dataclass."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    # Packed sequences are tuples with a `to` of their own, and know better than we what belongs where.
    return list(batch) if isinstance(batch, (list, tuple)) and not hasattr(batch, "to") else None


def rebuilt(batch: Any, items: list[Any]) -> Any:
    """Return a nest of the kind of `batch` with other `items` in it."""
    if isinstance(batch, Mapping):
        named = dict(zip(batch, items, strict=True))
        if not isinstance(batch, MutableMapping):
            kind: Any = type(batch)
            return kind(named)
        copied: Any = copy.copy(batch)  # some kinds, such as defaultdict, are made of more than items
        copied.update(named)
        return copied
    if dataclasses.is_dataclass(batch):
        copied = copy.copy(batch)
        for field, item in zip(dataclasses.fields(batch), items, strict=True):
            object.__setattr__(copied, field.name, item)  # also of frozen ones, and those that are no arguments
        return copied
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def samples_in(batch: Any) -> int:
    """Return the samples in `batch`: the length of the first tensor found in it, 1 if there is none."""
    return _samples_in(batch) or 1


def _samples_in(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    items = list(batch) if isinstance(batch, tuple) else items_of(batch) or []
    return next((count for item in items if (count := _samples_in(item)) is not None), None)


def map_leaves(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Return `tree`, of plain dicts, lists and tuples, with what `replace` makes of everything else in it."""
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, map_leaves(value, replace)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(value, replace) for value in tree)
    return replace(tree)
