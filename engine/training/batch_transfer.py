"""Moves batches to a rank's device; to a GPU on its own CUDA stream during earlier steps."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from midstride.engine.modules.hooks import own_hook
from midstride.engine.modules.module import TRANSFER_HOOKS
from midstride.engine.training.context import EvaluationContext
from midstride.engine.trees import convert, move

__all__ = ["BatchStream", "batch_transfer", "copy_stream"]


def batch_transfer(context: EvaluationContext, loader: int = 0) -> Callable[[Any], Any]:
    """Return a function that moves a loader's batch to this device and converts its precision.

    With lanes, it takes a dict of each lane's batch. The transfer hooks are looked up here, once, since a failed
    lookup on a module takes microseconds.
    """
    transfer = _transfer(context, loader)
    if context.lanes is None:
        return transfer
    return lambda batch: {lane: transfer(lane_batch) for lane, lane_batch in batch.items()}


def _transfer(context: EvaluationContext, loader: int) -> Callable[[Any], Any]:
    before, moved, after = (_hook(context, name) for name in TRANSFER_HOOKS)
    device, converted = context.device, context.precision.batch
    if before is moved is after is None and device.type == "cpu":
        return converted

    to_device = BatchStream(device).move if device.type == "cuda" else partial(move, device=device)

    def transfer(batch: Any) -> Any:
        batch = batch if before is None else before(batch, loader)
        batch = to_device(batch) if moved is None else moved(batch, device, loader)
        batch = batch if after is None else after(batch, loader)
        return converted(batch)

    return transfer


def _hook(context: EvaluationContext, name: str) -> Callable[..., Any] | None:
    """Return the hook `name` of the DataModule, or else of the module; None if neither has it."""
    for owner in (context.trainer.datamodule, context.module):
        if (hook := own_hook(owner, name)) is not None:
            return hook
    return None


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all loaders of this process copy batches to `device`.

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
    """Return whether `tensor` is dense and on the CPU, as `record_stream` on its copy needs."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) is Tensor and is_dense and tensor.device.type == "cpu"
