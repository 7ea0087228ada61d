"""Prefect tasks: the report of a run, as text and as a picture, and that of a night."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events.worker import EventsWorker

from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.night_report import NightlyReport, nightly_markdown, nightly_report
from midstride.engine.registry.nightly import NightlyRun
from midstride.engine.runs.cause import cause_of
from midstride.engine.runs.report_files import write_report
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import Report, report_of
from midstride.engine.runs.trackers import tell_trackers
from midstride.tasks.events import Event, RunFailed, RunFinished, RunStopped, emit
from midstride.tasks.job_argument import JobLike, run_of
from midstride.tasks.resources import artifact_key
from midstride.tasks.run_page import show_page
from midstride.tasks.server_outage import await_server

__all__ = ["publish_nightly_report", "publish_report", "stops_recorded"]

log = logging.getLogger(__name__)

_TELLING_S = 5.0
_BEFORE_RETRY = "asked to stop before the next attempt; before that: {}"
#: how the newest attempt of a run that was stopped had ended -> cause of the stop, with that of the end
_STOPPED_AFTER = {
    "stopped": "{}",
    "died": _BEFORE_RETRY,
    "lost": _BEFORE_RETRY,
    "done": "asked to stop after its training, before its weights were tested",
}


@task(name="publish report", task_run_name="publish report", cache_policy=NO_CACHE)
def publish_report(job: JobLike, run: str | None = None, test: dict[str, float] | None = None) -> Report:
    """Write report.md and curves.png to the run's folder and an artifact. Return the report.

    Args:
        job: a job, the path of its file, or its document.
        run: name of the run; by default that of `launch_world` in this flow.
        test: result of `evaluate_best`.

    If Prefect's server is away, the report in the run's folder is written first, and the rest waits.

    Raises:
        SnapshotError: the store does not answer.
    """
    this = run_of(job, run)
    report, picture = write_report(this, test)
    if this.job.loggers:
        tell_trackers(this.store, report, this.job.folder)
    if await_server():
        show_page(report, picture)
    if report.outcome != "running":  # else another world advances it, and tells of its end
        emit(_emit_end(report))
    return report


@task(name="publish night", task_run_name="publish night", cache_policy=NO_CACHE)
def publish_nightly_report(night: NightlyRun, decision: PromotionDecision | None = None) -> NightlyReport:
    """Show challenger and champion side by side, and the champion now; return the same."""
    report = nightly_report(night, decision)
    title = f"{report.job}, night of {report.date}: {report.verdict}"
    if await_server():
        create_markdown_artifact(nightly_markdown(report), key=artifact_key(night.url, "night"), description=title)
    return report


@contextmanager
def stops_recorded(run: Run) -> Iterator[None]:
    """Record a stop of the flow in the block and report it to automations. No later task starts."""
    try:
        yield
    except Exception:
        raise
    except BaseException:
        _record_stop(run)
        raise


def _record_stop(run: Run) -> None:
    """Record a stop on request, also after a failed or completed attempt of an open flow."""
    try:
        report = report_of(run)
        run.attempts.record_stop()
        if report.outcome in _STOPPED_AFTER:
            emit(_stopped(report))
            EventsWorker.drain_all(timeout=_TELLING_S)  # after a SIGTERM nothing is sent at exit
    except Exception as error:  # the flow's end continues, with or without store and server
        log.warning("automations may miss that %s was stopped: %s", run.url, error)


def _emit_end(report: Report) -> Event:
    job, cause = report.job, cause_of(report.error)
    if report.outcome == "done":
        test, restarts = report.test, report.restarts
        return RunFinished(
            run=report.url,
            job=job,
            steps=report.steps,
            restarts=restarts,
            test=test,
            ended_by=report.ended_by,
            why=report.why,
        )
    if report.outcome == "stopped":
        return _stopped(report)
    return RunFailed(run=report.url, job=job, outcome=report.outcome, cause=cause, steps=report.steps)


def _stopped(report: Report) -> RunStopped:
    cause = _STOPPED_AFTER[report.outcome].format(cause_of(report.error) or report.outcome)
    return RunStopped(run=report.url, job=report.job, cause=cause, steps=report.steps)
