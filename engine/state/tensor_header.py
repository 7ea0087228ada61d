"""The header of a safetensors file. Needs no torch."""

import json
import struct
from collections.abc import Mapping, Sequence

__all__ = ["ELEMENT_BYTES", "tensor_header"]

#: elements of any dtype can start at a multiple of this
ELEMENT_BYTES = 64


def tensor_header(tensors: Mapping[str, tuple[str, Sequence[int], int]], start_bytes: int = ELEMENT_BYTES) -> bytes:
    """Return the header of a file with `tensors`: name -> dtype there, shape, bytes.

    It is padded to a multiple of `start_bytes`, where the tensors start.
    """
    entries, start = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % start_bytes)
    return struct.pack("<Q", len(text)) + text
