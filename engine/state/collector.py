"""Pauses the garbage collector while a state is copied."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector: a state is many new objects, and none of them is garbage yet.

    No process may be forked in the block: in the child the collector would stay off.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
