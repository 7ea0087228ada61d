"""The header of a safetensors file. Needs no torch."""

import json
import struct
from collections.abc import Mapping, Sequence

__all__ = ["tensor_header"]

#: where the tensors start: behind a header padded to a multiple of this
_START_BYTES = 64


def tensor_header(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """Return the header of a file with `tensors`: name -> dtype there, shape, bytes."""
    entries, start = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _START_BYTES)
    return struct.pack("<Q", len(text)) + text
