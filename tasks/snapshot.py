"""Prefect task: snapshots as the orchestrator sees them, checked from outside."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from midstride.engine.snapshots.inspection import check_announced
from midstride.tasks.events import SnapshotCommitted, emit

__all__ = ["record_snapshot"]


@task(name="record snapshot", task_run_name="snapshot at step {step}", cache_policy=NO_CACHE)
def record_snapshot(url: str, step: int, taken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the newly `taken` snapshots, and emit events.

    Args:
        url: of the run.
        step: of the newest of them.
        taken: one dict for each, with time, name, step, epoch, bytes and stall_s, as in the engine's events.

    Returns:
        The snapshots taken, each with its findings as "state", newest first.

    Raises:
        SnapshotDamaged: a committed snapshot is damaged.
    """
    checked = check_announced(url, taken)[::-1]
    for row in reversed(checked):
        emit(SnapshotCommitted(run=url, **row))
    return checked
