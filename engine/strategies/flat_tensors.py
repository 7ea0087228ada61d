"""Groups small tensors into flat ones, because single copies and sums take longer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midstride.engine.strategies.torch_internals import foreach_copy_

__all__ = ["bucket_indices", "copy_together", "view_like"]

#: elements: start of each tensor in a flat one, aligned as in an allocation of its own, so that kernels are the same
_ALIGNED = 128
#: bytes of weights or gradients in one copy
_COPY_BYTES = 32 << 20


def bucket_indices(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[int]]:
    """Return groups of indices of `tensors`, each of one dtype and device, up to `bucket_bytes`."""
    open_: dict[Any, tuple[int, list[int]]] = {}
    buckets: list[list[int]] = []
    for number, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        used, bucket = open_.get(kind, (math.inf, []))
        if used + tensor.nbytes > bucket_bytes:
            used, bucket = 0, []
            buckets.append(bucket)
        bucket.append(number)
        open_[kind] = int(used) + tensor.nbytes, bucket
    return buckets


def view_like(tensor: Tensor, flat: Tensor) -> Tensor:
    """Return a view of the 1-d `flat` in the shape of `tensor`, and in its strides if dense."""
    dense = torch.empty_like(tensor, device="meta")
    return flat.as_strided(dense.size(), dense.stride(), flat.storage_offset())


@torch.no_grad()
def copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies of `tensors` on `device`. Strided ones of a dtype move 32 MB at a time."""
    copies = [tensor if tensor.layout == torch.strided else tensor.clone().to(device) for tensor in tensors]
    dense = [number for number, tensor in enumerate(tensors) if tensor.layout == torch.strided]
    for bucket in bucket_indices([tensors[number] for number in dense], _COPY_BYTES):
        numbers = [dense[i] for i in bucket]
        sources = [tensors[number] for number in numbers]
        starts, end = [], 0
        for source in sources:
            starts.append(end)
            end += -(-source.numel() // _ALIGNED) * _ALIGNED
        flat = sources[0].new_empty(end)
        foreach_copy_(_views(flat, starts, sources), sources)
        there = _views(flat.to(device), starts, sources)
        for number, view in zip(numbers, there, strict=True):
            copies[number] = view.data  # with its own version counter, for in-place changes
    return copies


def _views(flat: Tensor, starts: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    return [view_like(tensor, flat.narrow(0, at, tensor.numel())) for at, tensor in zip(starts, like, strict=True)]
