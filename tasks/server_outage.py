"""Prefect's server while it does not answer: a flow's end waits, then does without it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx
from prefect import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Abort

from midstride.tasks.monitor import warn
from midstride.tasks.stop_requests import stop_delayed, stop_if_asked
from midstride.tasks.without_retries import without_retries

__all__ = ["ServerLost", "await_server", "ensure_server_hears", "is_server_up", "is_without_server", "server_ended_if"]

#: seconds for which the end of a flow waits
AWAITED_S = 600.0
ASKED_EVERY_S = 2.0
_POLL_S = 0.1

#: after this process has waited in vain: later calls ask once
_given_up = threading.Event()
_has_ended: ContextVar[Callable[[], bool]] = ContextVar("midstride_server_has_ended", default=lambda: False)


class ServerLost(Abort):
    """The flow is over, and Prefect's server is not there to hear of it.

    It ends the flow without calls of Prefect.

    Args:
        result: the flow's report, or its error.
    """

    def __init__(self, result: Any) -> None:
        done = "failed" if isinstance(result, Exception) else "done"
        super().__init__(
            f"the run is {done}, and Prefect's server was not told: it shows the flow run as Running. "
            "Run or retry it once the server answers: nothing is trained again"
        )
        self.result = result


@contextmanager
def server_ended_if(condition: Callable[[], bool]) -> Iterator[None]:
    """Wait in the block for no server once `condition` returns True: its process has ended."""
    token = _has_ended.set(condition)
    try:
        yield
    finally:
        _has_ended.reset(token)


def is_server_up() -> bool:
    """Ask Prefect's server once for an answer."""
    try:
        with stop_delayed(), without_retries(), get_client(sync_client=True) as client:
            client.hello()
    except httpx.HTTPError:
        return False
    return True


def await_server() -> bool:
    """Wait until Prefect's server answers, at most for `AWAITED_S`. Return whether it does.

    It says once that it waits, and how that ended. Once it has waited in vain, it asks once.
    """
    if is_server_up():
        _given_up.clear()
        return True
    if _given_up.is_set():
        return False
    if _has_ended.get()():
        warn("Prefect's server has ended: the flow ends without it")
        _given_up.set()
        return False
    warn(f"Prefect's server does not answer: the flow waits for it, up to {AWAITED_S / 60:.0f} minutes")
    until = time.monotonic() + AWAITED_S
    while time.monotonic() < until:
        _pause()
        if is_server_up():
            warn("Prefect's server answers again")
            return True
    warn(f"Prefect's server did not answer for {AWAITED_S / 60:.0f} minutes: the flow ends without it")
    _given_up.set()
    return False


def is_without_server() -> bool:
    """Whether this process has waited for the server in vain."""
    return _given_up.is_set()


def _pause() -> None:
    until = time.monotonic() + ASKED_EVERY_S
    while time.monotonic() < until:
        stop_if_asked()
        time.sleep(_POLL_S)


def ensure_server_hears(result: object) -> None:
    """Wait for the server before a flow ends with `result`. A flow around it decides for itself.

    Raises:
        ServerLost: it does not answer.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.parent_task_run_id is not None:
        return
    if not await_server():
        raise ServerLost(result)
