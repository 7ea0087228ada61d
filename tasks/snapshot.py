"""Prefect task: snapshots as the orchestrator sees them, checked from outside."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from midstride.engine.snapshots.inspection import inspect_snapshots
from midstride.tasks.events import SnapshotCommitted, emit
from midstride.tasks.keys import artifact_key

__all__ = ["record_snapshot"]


@task(name="record snapshot", task_run_name="snapshot at step {step}", cache_policy=NO_CACHE)
def record_snapshot(url: str, step: int, taken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the snapshots `taken` since the last time, show them as a table, and say so in events.

    Args:
        url: of the run.
        step: of the newest of them.
        taken: one dict for each, with name, step, bytes and stall_s, as in the engine's events.

    Raises:
        SnapshotDamaged: what was committed is not whole.
    """
    checked = inspect_snapshots(url, taken)
    create_table_artifact(checked, key=artifact_key(url, "snapshots"), description=f"Snapshots of {url}")
    for row in checked:
        emit(SnapshotCommitted(run=url, **row))
    return checked
