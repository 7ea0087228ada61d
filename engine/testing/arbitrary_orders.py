"""Orders that Python and file systems leave open, changed in a process, so that code that depends on them shows."""

import os
from collections.abc import Iterator
from typing import Any

__all__ = ["other_hash_seed", "reverse_listings"]


def other_hash_seed() -> dict[str, str]:
    """Return a variable with which a new interpreter hashes strings differently, and so orders sets of them."""
    return {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}


def reverse_listings() -> None:
    """Let `os.listdir` and `os.scandir`, and so `glob` and `pathlib`, list folders in reverse, in this process."""
    listdir, scandir = os.listdir, os.scandir

    def reversed_listdir(path: Any = ".") -> list[Any]:
        return listdir(path)[::-1]

    class ReversedScandir:
        def __init__(self, path: Any = ".") -> None:
            with scandir(path) as found:
                self._entries = iter([*found][::-1])

        def __enter__(self) -> Iterator[Any]:
            return iter(self)

        def __exit__(self, *_: object) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self._entries)

        def close(self) -> None:
            pass

    replaced: Any = os
    replaced.listdir, replaced.scandir = reversed_listdir, ReversedScandir
