"""Imported late by the process that tests are forked from: its memory in huge pages, where the machine has them.

A fork copies an entry for each page, and its end takes them back: 11 ms for the 270 MB of torch and its compiler in
pages of 4 KiB on a quiet machine, 4 ms in huge ones. A fork that trains takes 200 ms, so a thirtieth of that is won.
"""

import ctypes
from pathlib import Path

__all__: list[str] = []

_HUGE_BYTES = 2 * 2**20
_MADV_COLLAPSE = 25  # Linux 6.1


def _collapse() -> None:
    """Gather the heap and other private memory; what cannot be stays as it is."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, _, _, inode, *name = line.split()
        if inode != "0" or not access.startswith("rw") or name not in ([], ["[heap]"]):
            continue
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        start, end = -(-first // _HUGE_BYTES) * _HUGE_BYTES, last // _HUGE_BYTES * _HUGE_BYTES
        if end > start:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


_collapse()
