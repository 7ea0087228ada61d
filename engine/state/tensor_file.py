"""Reads safetensors files in one pass, with checked digests and separate memory per tensor.

The peak memory is that of the tensors and a few chunks. Tensors are returned only after the last byte was checked.
"""

import json
from collections.abc import Collection, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.state.bounds import damaged_on_error, sizes
from midstride.engine.state.tensors import DTYPES, FreshTensors
from midstride.engine.storage.checksums import FileDigest, check_digest, check_size
from midstride.engine.storage.store import Store

__all__ = ["read_tensors"]

_LENGTH_BYTES = 8
_HEADER_BYTES = 100 * 2**20  # as the format has it


class _Entry(NamedTuple):
    """The entry of one tensor in the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def read_tensors(store: Store, path: str, expected: FileDigest, only: Collection[str] | None = None) -> FreshTensors:
    """Return the tensors in the file at `path`, or those named in `only`.

    Raises:
        SnapshotDamaged: the file is missing, differs from `expected`, or is no safetensors file.
    """
    where = f"{store.url}/{path}"
    try:
        with store.reading(path):
            size = store.size(path)
            check_size(where, expected, size)
            source = _Source(store.stream(path))
            try:
                tensors = _tensors(source, size, where, only)
            except SnapshotDamaged:
                source.drain()
                check_digest(where, expected, source.digest)  # damage says more than what it led to
                raise
            source.drain()
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{where} is missing, its manifest says {expected['bytes']} bytes") from error
    check_digest(where, expected, source.digest)
    return tensors


class _Source:
    """A stream of chunks, with a running digest of the bytes that were read."""

    def __init__(self, chunks: Iterator[bytes | memoryview]) -> None:
        self._chunks, self._left = chunks, memoryview(b"")
        self._bytes, self._digest = 0, xxh3_128()

    @property
    def digest(self) -> FileDigest:
        """Digest of the bytes read so far."""
        return {"bytes": self._bytes, "xxh3_128": self._digest.hexdigest()}

    def take(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes, in pieces."""
        while size:
            if not self._left and not self._fetch():
                raise ValueError(f"it ends {size} bytes too early")
            piece, self._left = self._left[:size], self._left[size:]
            size -= len(piece)
            yield piece

    def bytes(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        return b"".join(map(bytes, self.take(size)))

    def drain(self) -> None:
        """Read the rest, for the digest."""
        while self._fetch():
            pass

    def _fetch(self) -> bool:
        self._left = memoryview(next(self._chunks, b""))
        self._digest.update(self._left)
        self._bytes += len(self._left)
        return bool(self._left)


def _tensors(source: _Source, size: int, where: str, only: Collection[str] | None) -> FreshTensors:
    with damaged_on_error(where):
        entries = _entries(source, size)
    tensors = FreshTensors()
    for entry in entries:
        if only is None or entry.name in only:
            tensors[entry.name] = _read(source, entry, where)
        else:
            with damaged_on_error(where):
                for _ in source.take(entry.nbytes):
                    pass
    return tensors


def _entries(source: _Source, size: int) -> list[_Entry]:
    """Return the entries of the header, in the order of their bytes."""
    left = size - _LENGTH_BYTES
    length = int.from_bytes(source.bytes(_LENGTH_BYTES), "little")
    if length > min(left, _HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header: dict[str, Any] = json.loads(source.bytes(length))
    header.pop("__metadata__", None)
    entries, at = [], 0
    for name, said in sorted(header.items(), key=lambda item: tuple(sizes(item[1]["data_offsets"]))):
        dtype, shape, (start, end) = DTYPES[said["dtype"]], sizes(said["shape"]), said["data_offsets"]
        if start != at or end - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"bytes {start} to {end} for tensor {name} of {dtype} {shape}")
        entries.append(_Entry(name, dtype, shape, end - start))
        at = end
    if at != left - length:
        raise ValueError(f"tensors of {at} bytes in {left - length}")
    return entries


def _read(source: _Source, entry: _Entry, where: str) -> Tensor:
    memory = torch.empty(entry.nbytes, dtype=torch.uint8)  # as many are there: the sizes add up to that of the file
    target, at = memory.numpy(), 0
    with damaged_on_error(where):
        for piece in source.take(entry.nbytes):
            target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
    return memory.view(entry.dtype).view(entry.shape)
