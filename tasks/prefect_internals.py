"""Private names of Prefect, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

from prefect.context import FlowRunContext

__all__ = ["heartbeats_not_awaited", "outer_flow", "show_first"]


@contextmanager
def heartbeats_not_awaited() -> Iterator[None]:
    """End flows in the block without their heartbeat thread, which wakes up once a second.

    The thread sends nothing after that and ends with the process, as Prefect has it for async flows. If Prefect waits
    in another way, nothing changes.
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


def show_first(deployment: Any, *names: str) -> None:
    """Show parameters first in the form of `deployment`, if Prefect keeps its form there."""
    form = getattr(deployment, "_parameter_openapi_schema", None)
    properties = getattr(form, "properties", {})
    for place, name in enumerate(names):
        if name in properties:
            properties[name]["position"] = place - len(names)


def outer_flow(context: FlowRunContext) -> FlowRunContext | None:
    """Return the flow around that of `context` in this process; None without a visible one."""
    outer = getattr(getattr(context, "_token", None), "old_value", None)
    return outer if isinstance(outer, FlowRunContext) else None
