"""Copies batches to a GPU on a separate CUDA stream, while earlier steps are computed."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from midstride.engine.trees import convert

__all__ = ["BatchStream", "copy_stream"]


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which batches are copied to `device`; all loaders of this process share it.

    The allocator reuses the memory of a batch for later batches on the same stream only.
    """
    return torch.cuda.Stream(device)


class BatchStream:
    """Copies batches to a GPU while it computes.

    The host does not wait for steps, so it reads a batch while earlier ones are computed. A copy on the computing
    stream would start only after these, and the host would wait for it if the memory of the batch is not pinned.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)

    def move(self, batch: Any) -> Any:
        """Return `batch` on the GPU; the current stream waits for the copy."""
        computing = torch.cuda.current_stream(self._device)

        def copied(tensor: Tensor) -> Tensor:
            if not _is_plain(tensor):
                return tensor.to(self._device, non_blocking=True)
            with torch.cuda.stream(self._stream):
                copy = tensor.to(self._device, non_blocking=True)
            copy.record_stream(computing)  # keeps its memory until the steps that read it are done
            return copy

        moved = convert(batch, copied, lambda other: other.to(self._device))
        computing.wait_stream(self._stream)
        return moved


def _is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is a dense one on the CPU, so that `record_stream` works on its copy."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) is Tensor and is_dense and tensor.device.type == "cpu"
