"""Prefect task: what a run came to, as text and as a picture."""

import base64
from contextlib import suppress

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events.worker import EventsWorker

from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.recovery import settle_lost
from midstride.engine.runs.curves import draw
from midstride.engine.runs.markdown import headline, markdown_of
from midstride.engine.runs.report import Report, metric_rows, report_of, summarize_error
from midstride.engine.runs.run import Run
from midstride.tasks.events import Event, RunFailed, RunFinished, RunStopped, emit
from midstride.tasks.resources import artifact_key

__all__ = ["publish_report", "tell_stopped"]

_TELLING_S = 5.0


@task(name="publish report", task_run_name="publish report", cache_policy=NO_CACHE)
def publish_report(job: TrainingJob, run: str, test: dict[str, float] | None = None) -> Report:
    """Write report.md and curves.png into the run's folder, show both as an artifact, and return the report."""
    this = Run(job, run)
    settle_lost(this)
    report, store = report_of(this, test), this.store
    marks = [failure.resumed_step for failure in report.failures if failure.resumed_step is not None]
    picture = draw(metric_rows(store), f"{job.name}: {run}", marks)
    files = {**report.files, "report": f"{store.url}/report.md"}
    if picture:
        store.write("curves.png", picture)
        files["curves"] = f"{store.url}/curves.png"
    report = report.model_copy(update={"files": files})
    store.write("report.md", markdown_of(report, "curves.png" if picture else None).encode())
    inline = f"data:image/png;base64,{base64.b64encode(picture).decode()}" if picture else None
    words = f"{job.name}, run {run}: {headline(report)}"
    create_markdown_artifact(markdown_of(report, inline), key=artifact_key(store.url, "report"), description=words)
    emit(_ended(report))
    return report


def tell_stopped(job: TrainingJob, run: str) -> None:
    """Let automations know of a run that was asked to stop, while its flow is on the way out: it is no task."""
    with suppress(Exception):  # what ends the flow goes on, whatever store and server say
        report = report_of(Run(job, run))
        if report.outcome == "stopped":
            emit(_ended(report))
            EventsWorker.drain_all(timeout=_TELLING_S)  # after a SIGTERM nothing is sent at exit


def _ended(report: Report) -> Event:
    job, cause = report.job, summarize_error(report.error)
    if report.outcome == "done":
        test, restarts = report.test, report.restarts
        return RunFinished(run=report.url, job=job, steps=report.steps, restarts=restarts, test=test)
    if report.outcome == "stopped":
        return RunStopped(run=report.url, job=job, cause=cause, steps=report.steps)
    return RunFailed(run=report.url, job=job, outcome=report.outcome, cause=cause, steps=report.steps)
