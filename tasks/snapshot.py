"""Prefect task: snapshots as the orchestrator sees them, checked from outside."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from midstride.engine.formatting import format_bytes, format_run_name, format_seconds
from midstride.engine.snapshots.inspection import check_announced
from midstride.tasks.events import SnapshotCommitted, emit
from midstride.tasks.resources import artifact_key

__all__ = ["record_snapshot"]


@task(name="record snapshot", task_run_name="snapshot at step {step}", cache_policy=NO_CACHE)
def record_snapshot(
    url: str, step: int, taken: list[dict[str, Any]], recorded: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Check the newly `taken` snapshots, show them in a table, and emit events.

    Args:
        url: of the run.
        step: of the newest of them.
        taken: one dict for each, with time, name, step, epoch, bytes and stall_s, as in the engine's events.
        recorded: result of an earlier call, newest first: the rest of the table.

    Returns:
        The snapshots taken, each with its findings as "state", newest first.

    Raises:
        SnapshotDamaged: a committed snapshot is damaged.
    """
    checked = check_announced(url, taken)[::-1]
    table = [_markdown(row) for row in (*checked, *recorded)]
    title = f"run {format_run_name(url.rstrip('/').rpartition('/')[2])}: snapshots"
    create_table_artifact(table, key=artifact_key(url, "snapshots"), description=title)
    for row in reversed(checked):
        emit(SnapshotCommitted(run=url, **row))
    return checked


def _markdown(row: dict[str, Any]) -> dict[str, Any]:
    """One line of the table, for people."""
    return {
        "at": datetime.fromtimestamp(row["time"]).astimezone().strftime("%H:%M:%S"),
        "step": row["step"],
        "epoch": row["epoch"],
        "size": format_bytes(row["bytes"]),
        "stall": format_seconds(row["stall_s"]),
        "checked": row["state"],
        "name": row["name"],
    }
