"""Cutting a batch into parts, and joining what came out of them, by the rules of `nn.DataParallel`."""

import dataclasses
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.trees import items_of, rebuilt

__all__ = ["cut", "join"]


def cut(batch: Any, parts: int) -> list[Any]:
    """Return `batch` in at most `parts` parts along the samples, as `Tensor.chunk` cuts: 30 in 4 give 8, 8, 8 and 6.

    Args:
        batch: a nest of dicts, lists, tuples and dataclasses. Tensors are cut; a list of plain values that is as
            long as the batch (texts, say) is cut too; other plain values go to every part.
        parts: at most so many.

    Raises:
        UserError: tensors disagree on the number of samples, or something cannot be cut.
    """
    _check_whole(batch, parts)
    sizes = dict(_sizes(batch, "batch"))
    if not sizes:
        raise UserError(f"a batch without tensors, a {type(batch).__name__}, cannot be cut into {parts} parts.")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise UserError(f"the batch cannot be cut into {parts} parts: its tensors disagree on the samples: {found}.")
    samples = next(iter(sizes.values()))
    lengths = [len(chunk) for chunk in torch.empty(samples).chunk(parts)]
    return [_part(batch, sum(lengths[:i]), length, samples) for i, length in enumerate(lengths)]


def _sizes(value: Any, path: str) -> list[tuple[str, int]]:
    """The first dimension of every tensor in `value`, by its path."""
    if isinstance(value, Tensor):
        return [(path, len(value))] if value.ndim else []
    items = items_of(value) or []
    if isinstance(value, Mapping):
        places = [f"{path}[{key!r}]" for key in value]
    elif dataclasses.is_dataclass(value):
        places = [f"{path}.{field.name}" for field in dataclasses.fields(value)]
    else:
        places = [f"{path}[{place}]" for place in range(len(items))]
    return [size for place, item in zip(places, items, strict=True) for size in _sizes(item, place)]


def _part(value: Any, start: int, length: int, samples: int) -> Any:
    """The part of `value` from sample `start` on."""
    if isinstance(value, Tensor):
        return value.narrow(0, start, length) if value.ndim else value
    items = items_of(value)
    if items is None:
        return value
    if isinstance(value, list) and len(value) == samples and not any(_sizes(item, "") for item in value):
        return value[start : start + length]
    return rebuilt(value, [_part(item, start, length, samples) for item in items])


def _check_whole(value: Any, parts: int) -> None:
    """Refuse what holds tensors in a way that only it knows."""
    for item in items_of(value) or ([] if isinstance(value, Tensor) else [value]):
        if item is not value:
            _check_whole(item, parts)
        elif hasattr(value, "to"):
            raise UserError(
                f"a {type(value).__name__} in a batch cannot be cut into {parts} parts: put its tensors into a dict, a "
                "list or a dataclass, or use ddp, which cuts no batch."
            )


def join(parts: list[Any]) -> Any:
    """Return the outputs of the parts as one: tensors one after the other, single numbers as a vector.

    Raises:
        UserError: the parts differ in kind.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise UserError(f"the parts of a batch gave {kinds}: all must give the same kind of output.")
    if isinstance(first, Tensor):
        home = [part.to(first.device) for part in parts]
        return torch.cat(home) if first.ndim else torch.stack(home)
    if first is None or isinstance(first, Number):
        return None if first is None else torch.tensor(parts)
    several = [items_of(part) for part in parts]
    if several[0] is None:
        return parts
    if any(items is None or len(items) != len(several[0]) for items in several):
        raise UserError(f"the parts of a batch gave a {type(first).__name__} of different lengths.")
    return rebuilt(first, [join(list(items)) for items in zip(*several, strict=True)])
