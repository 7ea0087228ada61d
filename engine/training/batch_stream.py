"""Batches come to a GPU on a stream of their own, while steps before them are computed."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from midstride.engine.trees import convert

__all__ = ["BatchStream", "copy_stream"]


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which batches come to `device`, the same for all loaders of this process.

    The memory of a batch is used again for later ones on its stream, and for nothing else.
    """
    return torch.cuda.Stream(device)


class BatchStream:
    """Copies batches to a GPU beside what it computes.

    The host does not wait for steps, so it reads a batch while earlier ones are computed. A copy on the stream that
    computes would begin after them, and where the batch's memory is not pinned the host would wait for that.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)

    def move(self, batch: Any) -> Any:
        """Return `batch` on the GPU, ready for what the current stream computes from now on."""
        computing = torch.cuda.current_stream(self._device)

        def copied(tensor: Tensor) -> Tensor:
            if not _is_plain(tensor):
                return tensor.to(self._device, non_blocking=True)
            with torch.cuda.stream(self._stream):
                copy = tensor.to(self._device, non_blocking=True)
            copy.record_stream(computing)  # its memory is free again when the steps that read it are done
            return copy

        moved = convert(batch, copied, lambda other: other.to(self._device))
        computing.wait_stream(self._stream)
        return moved


def _is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is the host's, and of one piece of memory, which the allocator can watch."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) is Tensor and is_dense and tensor.device.type == "cpu"
