"""The curves of a run while it trains, as an artifact."""

import base64

from prefect.artifacts import create_markdown_artifact

from midstride.engine.formatting import format_run_name
from midstride.engine.runs.report_files import curves_of
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of
from midstride.tasks.resources import artifact_key

__all__ = ["inline", "show_curves"]


def show_curves(run: Run) -> None:
    """Show the curves of `run` up to its newest snapshot; nothing where no picture can be drawn."""
    report = report_of(run)
    if picture := curves_of(run, report):
        title = f"{report.job}, run {format_run_name(report.run)}: curves"
        create_markdown_artifact(
            f"![curves]({inline(picture)})", key=artifact_key(run.url, "curves"), description=title
        )


def inline(picture: bytes) -> str:
    """Return the address of a PNG that stands in the address itself."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
