"""Imports of large libraries without repeated garbage collections of their objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

__all__ = ["collector_paused", "preload"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector in the block, where it takes a fifth of torch's import."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def preload(*modules: str) -> None:
    """Import `modules` in a process of ours, and exclude their objects from garbage collection.

    A collection in a fork would touch every object, and so copy its page; at the end of a process that has loaded
    torch it takes a second. Not for a user's process: its garbage so far would never be freed.
    """
    with collector_paused():
        for module in modules:
            import_module(module)
        gc.freeze()
