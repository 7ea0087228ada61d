"""Privates of Prefect, named here alone; `tests/unit/test_internals.py` tries each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

__all__ = ["heartbeats_not_awaited"]


@contextmanager
def heartbeats_not_awaited() -> Iterator[None]:
    """Have flows within end without waiting for the thread of their heartbeats, which wakes up once a second.

    It beats no more then, and ends with the process: Prefect leaves it so where a flow is async. A Prefect that
    waits in another way is left to it.
    """
    engine: Any = import_module("prefect.flow_engine")
    beats = getattr(engine, "_send_heartbeats", None)
    if beats is None or "join_on_exit" not in signature(beats).parameters:
        yield
        return
    engine._send_heartbeats = partial(beats, join_on_exit=False)
    try:
        yield
    finally:
        engine._send_heartbeats = beats
