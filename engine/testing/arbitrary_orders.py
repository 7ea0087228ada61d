"""Changes the orders of sets and listings in a process, to show code that follows them."""

import os
from collections.abc import Iterator
from typing import Any

__all__ = ["other_hash_seed", "reverse_listings"]


def other_hash_seed() -> dict[str, str]:
    """Return a variable that makes a new interpreter hash strings differently."""
    return {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}


def reverse_listings() -> None:
    """Reverse the results of `os.listdir` and `os.scandir`, and so of `glob` and `pathlib`."""
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
