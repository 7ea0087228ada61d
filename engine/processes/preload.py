"""Imports of what is large: torch makes a million objects that stay, and the collector counts them again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread

__all__ = ["collector_paused", "importing", "preload"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage within: a fifth of the time in which torch is imported goes there, and nothing is found."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def preload(*modules: str) -> None:
    """Import `modules` in a process of ours, and keep all there is by then out of the collector's sight.

    A collection in a fork would touch every object, and so copy its page; the one at the end of a process that has
    loaded torch takes a second. Not for a user's process: what is garbage there by now would stay.
    """
    with collector_paused():
        for module in modules:
            import_module(module)
        gc.freeze()


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Import `module`, if it is installed, on a thread beside the block, which mostly waits; it ends no sooner."""

    def load() -> None:
        with suppress(ImportError):
            import_module(module)

    thread = Thread(target=load, name=f"import-{module}")
    thread.start()
    try:
        yield
    finally:
        thread.join()
