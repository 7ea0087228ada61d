"""Shared memory, in which workers hand over batches: errors of it that say the way out."""

import errno
import os

from torch import Tensor

from midstride.engine.errors import WorldError

__all__ = ["full_message", "share"]

_FULL = (
    "the shared memory in which workers hand over batches, /dev/shm, is full: {error}. Free some of it, give the "
    "container more (docker run --shm-size=8g), use fewer workers, or none: num_workers=0 needs no shared memory"
)


def full_message(error: Exception) -> str:
    """Return a message if `error` is torch's that /dev/shm is full; "" if it is another one."""
    text = str(error)
    is_full = isinstance(error, RuntimeError) and "</torch_" in text and os.strerror(errno.ENOSPC) in text
    return _FULL.format(error=text) if is_full else ""


def share(tensor: Tensor) -> None:
    """Move `tensor` to shared memory.

    Raises:
        WorldError: there is no room for it.
    """
    try:
        tensor.share_memory_()
    except RuntimeError as error:
        if message := full_message(error):
            raise WorldError(message) from error
        raise
