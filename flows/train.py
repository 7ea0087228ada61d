"""Training flow: prepare, launch, evaluate, report. A retry resumes from the last snapshot."""

import logging
from typing import cast

from prefect import flow
from prefect.runtime import deployment, flow_run

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, RunHeld, WorldError
from midstride.engine.jobs.portability import relative_paths
from midstride.engine.launch.job_fork_server import job_fork_server
from midstride.engine.launch.recovery import recover_orphaned_attempts
from midstride.engine.registry.nightly import date_errors
from midstride.engine.runs.forked_job import as_forked, make_fork
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import Report
from midstride.engine.storage.listing import FolderListing
from midstride.flows.run_states import (
    cancelled_if_paused,
    completed,
    failed,
    is_automatic_retry,
    tag_run,
    train_name,
)
from midstride.tasks.credentials import credentials_of
from midstride.tasks.detach import detach
from midstride.tasks.evaluate import evaluate_best
from midstride.tasks.job_argument import JobLike, Text, as_job, default_run_name
from midstride.tasks.launch import launch_world
from midstride.tasks.prepare import prepare_data
from midstride.tasks.report import publish_report, stops_recorded

__all__ = ["HideEngineTracebacks", "attempts_so_far", "prepare_deployed_run", "run_launch", "train"]


_RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


@flow(name="train", flow_run_name=train_name)
def train(
    job: JobLike,
    run: Text = "",
    take_over: bool = False,
    fork_of: Text = "",
    fork_step: int | None = None,
) -> Report:
    """Train `job` to its end and return the report.

    Started again with the same run (a retry of this flow run or of its parent, or the same name), it resumes.

    Args:
        job: a job, or the path of its file.
        run: name of the run; if empty, the id of the flow run, or in a subflow a name that a retry finds again.
        take_over: take the run from another process that trains it now; else that is an error.
        fork_of: start the new run from a snapshot of this one: its name, folder or URL.
        fork_step: step of that snapshot; if empty, the newest.
    """
    job = as_job(job)
    try:
        with cancelled_if_paused():
            report = _train(job, run, take_over, fork_of, fork_step)
    except EngineError as error:
        return cast(Report, failed(error))
    return completed(report, "Completed", report.why)


def _train(job: TrainingJob, run: str, take_over: bool, fork_of: str, fork_step: int | None) -> Report:
    prepare_deployed_run(job)
    if faults := date_errors(job):
        raise JobError.of(f"job {job.name}", faults)
    with credentials_of(job), job_fork_server(job):
        this = Run(job, run or _default_name(job))
        if fork_of:
            make_fork(this, fork_of, fork_step)
        elif fork_step is not None:
            raise JobError("fork_step: name the run to fork in fork_of")
        this = as_forked(this)
        forgiven = attempts_so_far(this)
        data = prepare_data(this.job)
        with stops_recorded(this):
            run_launch(this, data, forgiven, take_over)
            tested = evaluate_best(this.job, this.name) if this.job.script is None else {}  # a script tests itself
        return publish_report(this.job, this.name, tested)


def _default_name(job: TrainingJob) -> str:
    here = str(flow_run.id)
    return here if flow_run.root_flow_run_id == here else default_run_name(job)


def prepare_deployed_run(job: TrainingJob) -> None:
    """Tag this run. If it has a deployment, refuse relative paths and detach it from its worker.

    Raises:
        JobError: with every relative path.
    """
    tag_run()
    if not deployment.id:
        return
    if faults := relative_paths(job):
        raise JobError.of(f"job {job.name}", faults)
    detach()
    for name in _RUN_LOGGERS:  # an error of ours is logged once, without the stack of Prefect
        logging.getLogger(name).addFilter(_hide_engine_tracebacks)


def attempts_so_far(run: Run) -> int:
    """Return the number of forgiven attempts: all after a start by a person or schedule, else 0.

    Raises:
        RunCancelled: it was cancelled.
        WorldError: the server's automation started it again after attempts that brought no newer snapshot.
    """
    automatic = is_automatic_retry()
    with run.store.errors_explained("read"):
        if automatic:  # its server, or its machine, can have ended the launcher; else a new attempt does it
            recover_orphaned_attempts(run)
        tried = run.attempts.attempts()
    if not automatic:
        return tried[-1].number if tried else 0
    verdict = run.attempts.verdict(run.job.retries_without_progress)
    if tried and tried[-1].failed and not verdict.retry:
        raise WorldError(f"the run crashed, and the automation does not resume it again: {verdict.reason}. Retry does.")
    return 0


def run_launch(run: Run, data: FolderListing, forgiven: int, take_over: bool = False) -> None:
    """Train `run` to its end on prepared `data`. After a failure publish its report.

    A refused command has none.
    """
    tried = len(run.attempts.attempts())
    try:
        launch_world(run.job, run.name, data, after=forgiven, take_over=take_over)
    except RunHeld:
        raise
    except Exception:
        if not tried or len(run.attempts.attempts()) > tried:
            publish_report(run.job, run.name)
        raise


class HideEngineTracebacks(logging.Filter):
    """Drops records with our error and its stack. The final state's record has the same message."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is logged."""
        return not (record.exc_info and isinstance(record.exc_info[1], EngineError))


_hide_engine_tracebacks = HideEngineTracebacks()
