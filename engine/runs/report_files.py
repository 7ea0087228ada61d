"""Writes a run's report: report.md, report.json, curves.png, metrics-so-far.csv."""

import logging

from midstride.engine.formatting import format_run_name
from midstride.engine.runs.curves import draw
from midstride.engine.runs.report_text import markdown_of
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import (
    CURVES,
    MARKDOWN,
    METRICS_SO_FAR,
    REPORT,
    Report,
    metric_log,
    metric_rows,
    report_of,
)

__all__ = ["curves_of", "write_report"]

log = logging.getLogger(__name__)


def write_report(run: Run, test: dict[str, float] | None = None) -> tuple[Report, bytes | None]:
    """Write the report of `run` to its folder. Return it with the picture of its curves, if any.

    Args:
        run: of a job.
        test: results of the test of the best weights.
    """
    report, store = report_of(run, test), run.store
    files = dict(report.files)
    if report.outcome == "done":
        store.remove(METRICS_SO_FAR)
        files.pop("metric log so far", None)
    elif rows := metric_log(store):
        store.write(METRICS_SO_FAR, rows.encode())
        files["metric log so far"] = f"{store.url}/{METRICS_SO_FAR}"
    if picture := curves_of(run, report):
        store.write(CURVES, picture)
        files["curves"] = f"{store.url}/{CURVES}"
    report = report.model_copy(update={"files": {**files, "report": f"{store.url}/{MARKDOWN}"}})
    store.write(MARKDOWN, markdown_of(report, CURVES if picture else None).encode())
    store.write(REPORT, report.model_dump_json(indent=1).encode())
    return report, picture


def curves_of(run: Run, report: Report) -> bytes | None:
    """Return the curves of `run` as a PNG with marks at resumes; None if they cannot be drawn."""
    marks = [failure.resumed_step for failure in report.failures if failure.resumed_step is not None]
    try:
        return draw(metric_rows(run.store), f"{run.job.name}: {format_run_name(run.name)}", marks)
    except Exception as error:  # a picture is not worth a run
        log.warning("the curves of %s could not be drawn: %s: %s", run.name, type(error).__name__, error)
        return None
