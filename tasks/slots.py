"""Claims slots of Prefect's global concurrency limits for a job with `resources`."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError
from midstride.tasks.monitor import warn
from midstride.tasks.server_outage import await_server
from midstride.tasks.stop_requests import stop_delayed, stop_if_asked

__all__ = ["claimed", "slots_claimed"]

#: seconds until the server takes slots back from a holder that is dead: the least that it allows
LEASE_S = 60.0
RENEWED_EVERY_S = 15.0
ASKED_EVERY_S = 3.0
_POLL_S = 0.1
_LOCKED = 423


@contextmanager
def slots_claimed(job: TrainingJob) -> Iterator[None]:
    """Hold the slots of `job.resources` in the block; wait for them first.

    The server takes them back when this process is dead for a minute.

    Raises:
        JobError: the server has no such limit, or one below the request.
    """
    with ExitStack() as held:
        for name in sorted(job.resources):  # in one order everywhere: no two jobs wait for each other
            held.enter_context(claimed(name, job.resources[name]))
        yield


@contextmanager
def claimed(name: str, slots: int) -> Iterator[None]:
    """Hold `slots` of the limit `name` in the block; wait for them first.

    If Prefect's server is away in mid-run, the block runs without them.
    """
    if not await_server():
        warn(f"{slots} of {name} are not held: Prefect's server does not answer")
        yield
        return
    _check_limit(name, slots)
    lease = _acquire(name, slots)
    ended = threading.Event()
    keeper = threading.Thread(target=copy_context().run, args=(_renew, name, lease, ended), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        _release(lease)


def _check_limit(name: str, slots: int) -> None:
    remedy = f"create it: prefect gcl create {name} --limit {slots}"
    with stop_delayed(), get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound as error:
            fault = f"resources.{name}: Prefect's server has no concurrency limit of that name; {remedy}"
            raise JobError.of("the job", [fault]) from error
    if limit.limit < slots:
        raise JobError.of("the job", [f"resources.{name}: {slots} are asked for, and the limit is {limit.limit}"])


def _acquire(name: str, slots: int) -> UUID:
    """Wait until `slots` of the limit `name` are free, and return their lease."""
    if (lease := _free_slots(name, slots)) is not None:
        return lease
    get_run_logger().info("waiting until %d of %s are free", slots, name)
    while True:
        until = time.monotonic() + ASKED_EVERY_S
        while time.monotonic() < until:
            stop_if_asked()
            time.sleep(_POLL_S)
        if (lease := _free_slots(name, slots)) is not None:
            return lease


def _free_slots(name: str, slots: int) -> UUID | None:
    """Return a lease of `slots` of the limit `name`; None if fewer are free."""
    task_run = TaskRunContext.get()
    holder = ConcurrencyLeaseHolder(type="task_run", id=task_run.task_run.id) if task_run else None
    with stop_delayed(), get_client(sync_client=True) as client:
        try:
            answer = client.increment_concurrency_slots_with_lease([name], slots, "concurrency", LEASE_S, holder)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == _LOCKED:
                return None
            raise
    return UUID(answer.json()["lease_id"])


def _renew(name: str, lease: UUID, ended: threading.Event) -> None:
    """Renew `lease` until `ended`. Training continues if the server forgets its slots."""
    has_warned = False
    while not ended.wait(RENEWED_EVERY_S):
        try:
            with get_client(sync_client=True) as client:
                client.renew_concurrency_lease(lease, LEASE_S)
            has_warned = False
        except Exception as error:
            if not has_warned:
                get_run_logger().warning("slots of %s are not renewed, others may take them: %s", name, error)
            has_warned = True


def _release(lease: UUID) -> None:
    with stop_delayed(), suppress(Exception), get_client(sync_client=True) as client:  # else it expires
        client.release_concurrency_slots_with_lease(lease)
