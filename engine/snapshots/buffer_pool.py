"""The buffer pool: host memory that snapshots are copied into, used again and again.

Copying to new memory costs several times as much as copying to memory that was used before: each page causes a fault.
So a buffer is touched once, kept, and reused only after its content was written.
"""

import contextlib
import logging
import mmap
import time
import weakref
from collections.abc import Callable
from threading import Condition
from typing import Any

import torch
from torch import Tensor

__all__ = ["Buffer", "BufferPool"]

log = logging.getLogger(__name__)

#: how many snapshots may be in progress: one that is written, and one that is copied
BUFFERS = 2
#: seconds of a wait from which on it is logged as a warning
LONG_WAIT_S = 1.0
WARN_EVERY_S = 60.0


class Buffer:
    """Memory of one snapshot: page-aligned, touched, not inherited by workers, pinned for a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> Tensor:
        """Return `size` bytes of the memory, as uint8, with arbitrary content.

        Too small a memory is replaced.
        """
        if size > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first: both may not fit
            self._memory = _touched(size)
        return self._memory[:size]

    def __len__(self) -> int:
        return self._memory.numel()


class BufferPool:
    """Two buffers, each of one snapshot at a time.

    The second is made only once a snapshot comes while the one before is still being written.

    Args:
        on_wait: called repeatedly while both buffers are in use, with the seconds waited so far and the reason.
    """

    def __init__(self, on_wait: Callable[[float, str], object] = lambda waited_s, why: None) -> None:
        self._on_wait = on_wait
        self._free: list[Buffer] = [Buffer()]
        self._made = 1
        self._changed = Condition()

    def acquire(self) -> tuple[Buffer, float]:
        """Return a free buffer, and the seconds it was waited for."""
        with self._changed:
            if self._free:
                return self._free.pop(), 0.0
            if self._made < BUFFERS:
                self._made += 1
                return Buffer(), 0.0
            began = time.monotonic()
            warned_s = 0.0
            while not self._changed.wait_for(lambda: self._free, timeout=LONG_WAIT_S):
                waited_s = time.monotonic() - began
                self._on_wait(waited_s, "training waits for the previous snapshot to be written")
                if waited_s - warned_s >= WARN_EVERY_S:
                    warned_s = waited_s
                    log.warning("training has waited %.0f s for the previous snapshot to be written", waited_s)
            buffer = self._free.pop()
        waited_s = time.monotonic() - began
        if waited_s > LONG_WAIT_S:
            log.warning(
                "training waited %.1f s for a snapshot to be written: they are taken faster than the store can write "
                "them. "
                "Take them less often (snapshots.every_steps, every_seconds or overhead).",
                waited_s,
            )
        return buffer, waited_s

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back, whose content was written or never will be."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()


def _touched(size: int) -> Tensor:
    # Whole pages: what is written past the page cache must start at one.
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked worker would share these pages until the next copy into them, and make each one a fault again.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without it
                pages.madvise(getattr(mmap, advice))
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    if torch.cuda.is_initialized():  # merely to ask whether there is a GPU takes from this process that it can fork
        _pin(memory)
    return memory


def _pin(memory: Tensor) -> None:
    """Let the GPU copy into `memory` by itself; if the driver refuses, copies are slower."""
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
