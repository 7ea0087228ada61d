"""Cuts a batch into chunks and joins their outputs by the rules of `nn.DataParallel`."""

from numbers import Number
from typing import Any

import torch
from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.trees import items_of, named_leaves, rebuilt

__all__ = ["cut", "join"]


def cut(batch: Any, chunks: int) -> list[Any]:
    """Return at most `chunks` chunks of `batch` along the samples: 30 in 4 gives 8, 8, 8, 6.

    Args:
        batch: a nest of dicts, lists, tuples and dataclasses. Tensors are cut; a list of plain values that is as
            long as the batch (texts, say) is cut too; other plain values go to every chunk.
        chunks: largest number of chunks.

    Raises:
        UserError: tensors disagree on the number of samples, or something cannot be cut.
    """
    if chunks == 1:
        return [batch]
    _check_whole(batch, chunks)
    sizes = dict(_sizes(batch, "batch"))
    if not sizes:
        raise UserError(
            f"the batch, a {type(batch).__name__} without tensors, cannot be cut into {chunks} parts: return tensors."
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise UserError(
            f"the batch cannot be cut into {chunks} parts: its tensors have different numbers of samples: {found}."
        )
    samples = next(iter(sizes.values()))
    lengths = [len(chunk) for chunk in torch.empty(samples).chunk(chunks)]
    return [_chunk(batch, sum(lengths[:i]), length, samples) for i, length in enumerate(lengths)]


def _sizes(value: Any, path: str) -> list[tuple[str, int]]:
    """Return the path and the first dimension of every tensor in `value`."""
    return [(where, len(leaf)) for where, leaf in named_leaves(value, path) if isinstance(leaf, Tensor) and leaf.ndim]


def _chunk(value: Any, start: int, length: int, samples: int) -> Any:
    """Return `length` samples of `value` from sample `start` on."""
    if isinstance(value, Tensor):
        return value.narrow(0, start, length) if value.ndim else value
    items = items_of(value)
    if items is None:
        return value
    if isinstance(value, list) and len(value) == samples and not any(_sizes(item, "") for item in value):
        return value[start : start + length]
    return rebuilt(value, [_chunk(item, start, length, samples) for item in items])


def _check_whole(value: Any, chunks: int) -> None:
    """Refuse objects that can hold tensors (by their method `to`) but cannot be cut."""
    for _, leaf in named_leaves(value):
        if hasattr(leaf, "to") and not isinstance(leaf, Tensor):
            raise UserError(
                f"a {type(leaf).__name__} in a batch cannot be cut into {chunks} parts: put its tensors into a dict, "
                "a list or a dataclass, or use ddp, which cuts no batch."
            )


def join(outputs: list[Any]) -> Any:
    """Return the outputs for the chunks as one: tensors concatenated, scalars as a vector.

    Raises:
        UserError: the outputs differ in type or length.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        kinds = ", ".join(sorted({type(output).__name__ for output in outputs}))
        raise UserError(f"the parts of a batch gave {kinds}: all must give the same kind of output.")
    if isinstance(first, Tensor):
        home = [output.to(first.device) for output in outputs]
        return torch.cat(home) if first.ndim else torch.stack(home)
    if first is None or isinstance(first, Number):
        return None if first is None else torch.tensor(outputs)
    several = [items_of(output) for output in outputs]
    if several[0] is None:
        return outputs
    if any(items is None or len(items) != len(several[0]) for items in several):
        raise UserError(
            f"the parts of a batch gave a {type(first).__name__} of different lengths: return equal numbers of items."
        )
    return rebuilt(first, [join(list(items)) for items in zip(*several, strict=True)])
