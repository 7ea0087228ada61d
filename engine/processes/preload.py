"""Imports of large libraries without repeated garbage collections of their objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

__all__ = ["collector_paused", "preload"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector in a block that makes many objects, none of them garbage yet.

    Of torch's import it takes a fifth. No process may be forked in the block: the collector would stay off there.
    """
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
