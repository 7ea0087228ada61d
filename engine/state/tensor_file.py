"""Reads ranges of safetensors files, with the blocks around them verified.

The peak memory is that of the wanted bytes and a few chunks. They are wrong until `read` returns, which it does only
after the last block was compared with its checksum.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.state.bounds import damaged_on_error, sizes
from midstride.engine.state.tensors import DTYPES
from midstride.engine.storage.checksums import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    BlockDigests,
    FileDigest,
    check_digest,
    check_size,
    digest_of_blocks,
)
from midstride.engine.storage.store import Store

__all__ = ["Run", "TensorEntry", "TensorFile", "blocks_in", "join_runs"]

_LENGTH_BYTES = 8
_HEADER_BYTES = 100 * 2**20  # as the format has it

#: first block and end
Run = tuple[int, int]


class TensorEntry(NamedTuple):
    """The entry of one tensor in the header.

    Args:
        dtype: of its elements in the file.
        shape: of the tensor in the file.
        start: its first byte in the file.
        end: the byte behind its last.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class _Span(NamedTuple):
    """Bytes of the file, and where they are copied to."""

    start: int
    end: int
    target: "np.ndarray[Any, Any]"


def blocks_in(size: int) -> int:
    """Return the number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


def join_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the blocks of all `runs` as few runs, in order."""
    joined: list[Run] = []
    for first, end in sorted(runs):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


class TensorFile:
    """A safetensors file that is read by ranges.

    Args:
        store: that holds it.
        path: of the file.
        expected: its size and checksum, from the manifest.
        table: checksums of its blocks; None to read and verify the whole file.

    Raises:
        SnapshotDamaged: the file is missing, of another size, or no safetensors file.
    """

    def __init__(self, store: Store, path: str, expected: FileDigest, table: bytes | None) -> None:
        self._store, self._path, self._where = store, path, f"{store.url}/{path}"
        self._expected, self._table = expected, table
        self._size, self._spans = expected["bytes"], list[_Span]()
        if table is not None and digest_of_blocks(self._size, table) != expected:
            raise SnapshotDamaged(f"the checksums of the blocks of {self._where} do not match its manifest")
        with self._reading():
            next(iter(store.stream(path, [])), None)  # a folder in its place cannot be read
            check_size(self._where, expected, store.size(path))
            self._head = self._read_head()
        self._head_digests = BlockDigests()
        self._head_digests.update(self._head)
        if table is not None:
            self._compare(0, self._head_digests.table)
        try:
            with damaged_on_error(self._where):
                self.entries = _entries(self._head, self._size)
        except SnapshotDamaged:
            self.read()  # damage says more than what it led to
            raise

    def want(self, start: int, memory: Tensor) -> None:
        """Have `read` copy the bytes from `start` on into `memory`, a uint8 tensor."""
        if memory.numel():
            self._spans.append(_Span(start, start + memory.numel(), memory.numpy()))

    @property
    def runs(self) -> list[Run]:
        """The blocks that `read` reads, or that were read for the header."""
        if self._table is None:
            return [(0, blocks_in(self._size))]
        wanted = [(span.start // BLOCK_BYTES, blocks_in(span.end)) for span in self._spans]
        return join_runs([(0, blocks_in(len(self._head))), *wanted])

    def read(self, also: Iterable[Run] = ()) -> None:
        """Read the wanted bytes, and verify the blocks around them and those in `also`.

        Raises:
            SnapshotDamaged: a block differs; it is named with both checksums.
        """
        spans = sorted(self._spans, key=lambda span: span.start)
        ends = [span.end for span in spans]  # no two of them overlap
        runs = [(max(first * BLOCK_BYTES, len(self._head)), end) for first, end in join_runs([*self.runs, *also])]
        ranges = [(start, min(end * BLOCK_BYTES, self._size)) for start, end in runs]
        digests, first = self._head_digests, 0
        _copy(spans, 0, self._head)
        for start, at, chunk in self._chunks([(start, end) for start, end in ranges if start < end]):
            if start == at and self._table is not None:
                self._compare(first, digests.table)
                digests, first = BlockDigests(), start // BLOCK_BYTES
            digests.update(chunk)
            _copy(spans[bisect_right(ends, at) :], at, chunk)
        if self._table is not None:
            self._compare(first, digests.table)
        else:
            check_digest(self._where, self._expected, digests.of_file)

    def _read_head(self) -> bytes:
        """Return the first blocks, up to the end of the header as far as they say where that is."""
        head = self._range(0, min(BLOCK_BYTES, self._size))
        length = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
        end = min(blocks_in(min(length, _HEADER_BYTES)) * BLOCK_BYTES, self._size)
        return head + self._range(len(head), end) if len(head) < end else head

    def _range(self, start: int, end: int) -> bytes:
        return b"".join(bytes(chunk) for _, _, chunk in self._chunks([(start, end)]))

    def _chunks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bytes | memoryview]]:
        """Yield `ranges` in chunks: start of the range, start of the chunk, its bytes."""
        with self._reading():
            stream = self._store.stream(self._path, ranges)
            for start, end in ranges:
                at = start
                while at < end:
                    chunk = next(stream, b"")
                    if not chunk:
                        raise SnapshotDamaged(f"{self._where} ends {end - at} bytes too early")
                    yield start, at, chunk
                    at += len(chunk)
            next(stream, None)  # its end: what it holds is given back

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with self._store.reading(self._path):
                yield
        except FileNotFoundError as error:
            size = self._expected["bytes"]
            raise SnapshotDamaged(f"{self._where} is missing, its manifest says {size} bytes") from error

    def _compare(self, first: int, found: bytes) -> None:
        """Compare checksums of the blocks from number `first` on with those in the table."""
        assert self._table is not None
        if found == self._table[first * DIGEST_BYTES :][: len(found)]:
            return
        for number in range(len(found) // DIGEST_BYTES):
            mine = found[number * DIGEST_BYTES :][:DIGEST_BYTES].hex()
            said = self._table[(first + number) * DIGEST_BYTES :][:DIGEST_BYTES].hex()
            if mine != said:
                block = f"the block at byte {(first + number) * BLOCK_BYTES}"
                raise SnapshotDamaged(f"{self._where} has checksum {mine}, its manifest says {said} ({block})")


def _copy(spans: Sequence[_Span], at: int, chunk: bytes | memoryview) -> None:
    """Copy the bytes of `chunk`, at `at` in the file, to the `spans` that want them."""
    data = np.frombuffer(chunk, np.uint8)
    for span in spans:
        start, end = max(span.start, at), min(span.end, at + len(data))
        if start >= at + len(data):
            break
        span.target[start - span.start : end - span.start] = data[start - at : end - at]


def _entries(head: bytes, size: int) -> dict[str, TensorEntry]:
    """Return the entries of the header, which `head` starts with."""
    left = size - _LENGTH_BYTES
    if len(head) < _LENGTH_BYTES:
        raise ValueError(f"it ends {_LENGTH_BYTES - len(head)} bytes too early")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if length > min(left, _HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header: dict[str, Any] = json.loads(head[_LENGTH_BYTES : _LENGTH_BYTES + length])
    header.pop("__metadata__", None)
    entries, at, begin = {}, 0, _LENGTH_BYTES + length
    for name, said in sorted(header.items(), key=lambda item: tuple(sizes(item[1]["data_offsets"]))):
        dtype, shape, (start, end) = DTYPES[said["dtype"]], sizes(said["shape"]), said["data_offsets"]
        if start != at or end - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"bytes {start} to {end} for tensor {name} of {dtype} {shape}")
        entries[name] = TensorEntry(dtype, shape, begin + start, begin + end)
        at = end
    if at != left - length:
        raise ValueError(f"tensors of {at} bytes in {left - length}")
    return entries
