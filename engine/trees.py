"""Nests of containers: their items, a nest with other items, and a map over the leaves.

Batches and outputs are nests of any dicts, lists, tuples and dataclasses. In a tree of state only plain ones are nests
(`is_state_leaf`): an object of a class derived from them, such as a `RowShard`, is a value.
"""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = [
    "convert",
    "is_state_leaf",
    "items_of",
    "known_samples",
    "map_leaves",
    "move",
    "named_leaves",
    "other_length",
    "rebuilt",
    "samples_in",
    "tensors_listed",
    "to_host",
]

#: what holds no tensors
_PLAIN = frozenset({type(None), bool, bytes, float, int, str})
#: what tells the samples of a batch, the first first
_KINDS = Tensor, np.ndarray


def items_of(nest: Any) -> list[Any] | None:
    """Return the direct items of `nest`; None if it is no dict, list, tuple or dataclass."""
    if isinstance(nest, Mapping):
        return list(nest.values())
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return [getattr(nest, field.name) for field in dataclasses.fields(nest)]
    # Packed sequences are tuples with a `to` of their own, and know better than we what belongs where.
    return list(nest) if isinstance(nest, (list, tuple)) and not hasattr(nest, "to") else None


def _paths_of(nest: Any, path: str) -> list[str]:
    """Return how code reaches each of the items of `nest`, which stands at `path`.

    >>> _paths_of({"x": [1, 2]}, "batch")
    ["batch['x']"]
    """
    if isinstance(nest, Mapping):
        return [f"{path}[{key!r}]" for key in nest]
    if dataclasses.is_dataclass(nest):
        return [f"{path}.{field.name}" for field in dataclasses.fields(nest)]
    if hasattr(nest, "_fields"):
        return [f"{path}.{name}" for name in nest._fields]
    return [f"{path}[{index}]" for index in range(len(nest))]


def rebuilt(nest: Any, items: list[Any]) -> Any:
    """Return a nest of the kind of `nest` with other `items` in it."""
    if isinstance(nest, Mapping):
        named = dict(zip(nest, items, strict=True))
        if not isinstance(nest, MutableMapping):
            kind: Any = type(nest)
            return kind(named)
        copied: Any = copy.copy(nest)  # some kinds, such as defaultdict, are made of more than items
        copied.update(named)
        return copied
    if dataclasses.is_dataclass(nest):
        copied = copy.copy(nest)
        for field, item in zip(dataclasses.fields(nest), items, strict=True):
            object.__setattr__(copied, field.name, item)  # also of frozen ones, and those that are no arguments
        return copied
    return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)


def is_state_leaf(value: Any) -> bool:
    """Return whether `value` is a leaf of a tree of state."""
    return type(value) not in (dict, OrderedDict, list, tuple)


def map_leaves(
    replace: Callable[..., Any], tree: Any, *others: Any, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """Return `tree` with each leaf replaced by `replace(leaf, leaves of others)`.

    Args:
        replace: of the leaf of each tree.
        tree: any nest.
        others: nests of the same form.
        is_leaf: whether `replace` is given what would be walked into.

    >>> map_leaves(max, {"a": [1, 5]}, {"a": [3, 4]})
    {'a': [3, 5]}
    """
    trees = tree, *others
    items = None if is_leaf(tree) else items_of(tree)
    if items is None:
        return replace(*trees)
    keyed = isinstance(tree, Mapping)  # another tree may have the keys in another order
    rows = [items, *([other[key] for key in tree] if keyed else items_of(other) or () for other in others)]
    return rebuilt(tree, [map_leaves(replace, *row, is_leaf=is_leaf) for row in zip(*rows, strict=True)])


def named_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of `tree`, which stands at `path`, and how code reaches it."""
    items = items_of(tree)
    if items is None:
        yield path, tree
        return
    for inner, item in zip(_paths_of(tree, path), items, strict=True):
        yield from named_leaves(item, inner)


def move(batch: Any, device: torch.device) -> Any:
    """Return `batch` on `device`; on the CPU there is nothing to move."""
    if device.type == "cpu":
        return batch
    return convert(batch, lambda tensor: tensor.to(device, non_blocking=True), lambda other: other.to(device))


def to_host(tree: Any) -> Any:
    """Return `tree` on the CPU."""
    return convert(tree, Tensor.cpu, lambda other: other.to(torch.device("cpu")))


def convert(
    batch: Any, change: Callable[[Tensor], Tensor], change_other: Callable[[Any], Any] = lambda other: other
) -> Any:
    """Return `batch` with every tensor in it changed.

    Args:
        batch: any nest; other values stay.
        change: of a tensor.
        change_other: of anything else that has `.to`.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        return change_other(leaf) if hasattr(leaf, "to") else leaf

    return map_leaves(changed, batch)


def samples_in(batch: Any) -> int:
    """Return the samples in `batch`, 1 if they are not known."""
    return known_samples(batch) or 1


def known_samples(batch: Any) -> int | None:
    """Return the length of the first tensor in `batch`, or of an array or a list of samples.

    An array counts without tensors, a list without both. In a packed sequence it is the number of sequences, in batches
    that have it their `batch_size`, as those of graphs. A tensor without dimensions tells nothing.
    """
    for kind in _KINDS:
        if (length := next(_lengths(batch, kind), None)) is not None:
            return length
    lists = batch.values() if isinstance(batch, Mapping) else [batch] if _is_list_of_samples(batch) else []
    return next((len(one) for one in lists if isinstance(one, list)), None)


def other_length(batch: Any, samples: int) -> int | None:
    """Return the length of a tensor in `batch` that differs from `samples`, if any.

    Arrays count without tensors.
    """
    if _stated_size(batch) is not None:
        return None
    for kind in _KINDS:
        if lengths := {*_lengths(batch, kind)}:
            return min(lengths - {samples}, default=None)
    return None


def tensors_listed(batch: Any) -> int | None:
    """Return the length of the first list in `batch` of tensors of one rank."""
    items = items_of(batch) or []
    if type(batch) in (list, tuple) and items and all(isinstance(item, Tensor) for item in items):
        return len(items) if len({item.ndim for item in items}) == 1 else None
    return next((found for item in items if (found := tensors_listed(item)) is not None), None)


def _is_list_of_samples(batch: Any) -> bool:
    """Return whether a list holds dicts or plain values; one of lists may hold columns."""
    return isinstance(batch, list) and (
        all(isinstance(item, Mapping) for item in batch) or _PLAIN.issuperset(map(type, batch))
    )


def _stated_size(batch: Any) -> int | None:
    """Return the `batch_size` of a batch of graphs or of a TensorDict; None of others."""
    size = getattr(batch, "batch_size", None) if hasattr(batch, "to") else None
    size = size[0] if isinstance(size, torch.Size) and size else size
    return int(size) if type(size) is int else None


def _lengths(batch: Any, kind: type[Any]) -> Iterator[int]:
    """Yield the lengths of the tensors or arrays in `batch`."""
    if isinstance(batch, PackedSequence):
        yield int(batch.batch_sizes[0])
    elif isinstance(batch, kind):
        if batch.ndim:  # of nested ones the shape may be unknown
            yield batch.size(0) if isinstance(batch, Tensor) else len(batch)
    elif (size := _stated_size(batch)) is not None:
        yield size
    else:
        items = list(batch) if isinstance(batch, tuple) else items_of(batch)
        if items is None:  # an object of the user's
            items = [one for one in getattr(batch, "__dict__", {}).values() if isinstance(one, kind)]
        for item in items:
            if type(item) not in _PLAIN:
                yield from _lengths(item, kind)
