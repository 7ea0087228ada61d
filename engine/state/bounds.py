"""Checks of documents. A snapshot is not trusted and reaches nothing outside of its files.

Checksums find damage, but a hostile file has the right ones. So file names must stay in the folder, dtypes come from
fixed lists (`dtypes.py`), and sizes are checked against the bytes that exist. Needs no torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from midstride.engine.errors import EngineError, SnapshotDamaged

__all__ = ["check_files", "check_view", "damaged_on_error", "sizes"]

#: largest apparent size of an expanded tensor (strides of 0) whose file is smaller
_EXPANDED_BYTES = 2**30
_MOST_DIMENSIONS = 64
_FILE_NAME = re.compile(r"\w[\w.~-]*", re.ASCII)


@contextmanager
def damaged_on_error(where: str) -> Iterator[None]:
    """Turn errors of reading a document in the block into SnapshotDamaged for the file `where`.

    Raises:
        SnapshotDamaged: with the error. Errors of a store, and those of the engine, are not changed.
    """
    try:
        yield
    except (EngineError, OSError, MemoryError):
        raise
    except RecursionError as error:
        raise SnapshotDamaged(f"{where} is nested deeper than anything this version writes") from error
    except Exception as error:
        raise SnapshotDamaged(
            f"{where} is not in the format of this version: {type(error).__name__}: {error}"
        ) from error


def check_files(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a manifest unless all its files are in its folder, with sizes and checksums.

    Raises:
        SnapshotDamaged: naming the file.
    """
    for name, entry in manifest["files"].items():
        if not _FILE_NAME.fullmatch(name):
            raise SnapshotDamaged(f"{where} names the file {name!r}, which is outside its folder")
        if type(entry["bytes"]) is not int or type(entry["xxh3_128"]) is not str:
            raise SnapshotDamaged(f"{where} says of {name} neither size nor checksum: {entry}")


def sizes(values: Any) -> tuple[int, ...]:
    """Return a shape or strides as a tuple.

    ValueError if they are not a list of non-negative integers.
    """
    if not isinstance(values, (list, tuple)) or len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"no shape or strides: {values!r:.80}")
    if any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        raise ValueError(f"no shape or strides: {values!r:.80}")
    return tuple(values)


def check_view(elements: int, itemsize: int, shape: Sequence[int], strides: Sequence[int], offset: Any = 0) -> None:
    """Check that a view stays in its buffer of `elements`, and is not enlarged by strides of 0.

    Raises:
        ValueError: it does not; the message has the size of the view and of the buffer.
    """
    (start,), count = sizes([offset]), prod(shape)
    if len(shape) != len(strides):
        raise ValueError(f"strides {strides} for a shape {shape}")
    end = start + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1 if count else start
    if end > elements:
        raise ValueError(f"a view of element {end} of {elements}")
    if count * itemsize > max(elements * itemsize, _EXPANDED_BYTES):
        raise ValueError(f"a view of {count} elements of a tensor that has {elements}")
