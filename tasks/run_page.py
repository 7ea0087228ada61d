"""Page of a run among Prefect's artifacts: its report so far, as one updated artifact."""

import base64
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from prefect import get_client
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.runtime import flow_run

from midstride.engine.formatting import format_bytes, format_run_name, format_seconds, markdown_table
from midstride.engine.runs.report_files import curves_of
from midstride.engine.runs.report_text import headline, markdown_of
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import Report, report_of
from midstride.tasks.resources import artifact_key

__all__ = ["inline", "show_page", "show_progress_page"]

_SNAPSHOTS = re.compile(r"## Snapshots\n.*?(?=\n## |\Z)", re.DOTALL)
_COLUMNS = ("at", "step", "epoch", "size", "stall", "checked", "name")


def show_progress_page(run: Run, snapshots: Sequence[dict[str, Any]]) -> None:
    """Show the progress of `run`, its curves up to the newest snapshot, and `snapshots`.

    The newest come first.
    """
    report = report_of(run)
    show_page(report, curves_of(run, report), _snapshots(snapshots))


def show_page(report: Report, picture: bytes | None, snapshots: str = "") -> None:
    """Show `report` on the run's page. Without `snapshots`, keep that section."""
    key = artifact_key(report.url, "report")
    title = f"{report.job}, run {format_run_name(report.run)}: {headline(report)}"
    text = markdown_of(report, inline(picture) if picture else None)
    there = _there(key)
    if not snapshots and there is not None and (kept := _SNAPSHOTS.search(str(there.data))):
        snapshots = kept[0]
    text = f"{text}\n{snapshots.strip()}\n" if snapshots else text
    if there is None:
        create_markdown_artifact(text, key=key, description=title)
        return
    with get_client(sync_client=True) as client:
        client.update_artifact(there.id, ArtifactUpdate(data=text, description=title))


def inline(picture: bytes) -> str:
    """Return the address of a PNG that stands in the address itself."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _there(key: str) -> Artifact | None:
    """Return the page that this flow run has already."""
    here = ArtifactFilterFlowRunId(any_=[flow_run.id])
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]), flow_run_id=here)
        )
    return found[0] if found else None


def _snapshots(recorded: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            datetime.fromtimestamp(row["time"]).astimezone().strftime("%H:%M:%S"),
            str(row["step"]),
            str(row["epoch"]),
            format_bytes(row["bytes"]),
            format_seconds(row["stall_s"]),
            row["state"],
            row["name"],
        )
        for row in recorded
    ]
    return f"## Snapshots\n\n{markdown_table(_COLUMNS, rows)}" if rows else ""
