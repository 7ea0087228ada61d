"""The flow that trains: prepare, launch, evaluate, report. It survives whatever stops it."""

from typing import cast

from prefect import flow
from prefect.runtime import deployment, flow_run

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, WorldError
from midstride.engine.jobs.portability import relative_paths
from midstride.engine.launch.job_fork_server import job_fork_server
from midstride.engine.launch.recovery import recover_orphaned_attempts
from midstride.engine.processes.preload import importing
from midstride.engine.registry.nightly import date_errors
from midstride.engine.runs.curves import LIBRARY
from midstride.engine.runs.report import Report
from midstride.engine.runs.run import Run
from midstride.engine.storage.listing import Manifest, is_unchanged
from midstride.tasks.detach import detach
from midstride.flows.log_filters import hide_engine_tracebacks
from midstride.flows.run_states import failed, is_automatic_retry, tag_run, train_name
from midstride.tasks.credentials import credentials_of
from midstride.tasks.evaluate import evaluate_best
from midstride.tasks.launch import launch_world
from midstride.tasks.prepare import prepare_data
from midstride.tasks.report import publish_report, stops_recorded

__all__ = ["attempts_so_far", "prepare_deployed_run", "run_launch", "run_prepare", "train"]


@flow(name="train", flow_run_name=train_name)
def train(job: TrainingJob, run: str | None = None) -> Report:
    """Train `job` to its end and report what came of it.

    Started again with the same run (a retry of this flow run, or the same name), it picks up where it stopped.

    Args:
        job: what is trained, on what, how and where.
        run: name of the run; the flow run's id if empty.
    """
    name = run or str(flow_run.id)
    try:
        prepare_deployed_run(job)
        if faults := date_errors(job):
            raise JobError.of(f"job {job.name}", faults)
        with credentials_of(job), job_fork_server(job), importing(LIBRARY):  # for the report
            this = Run(job, name)
            forgiven = attempts_so_far(this)
            run_prepare(job)
            with stops_recorded(this):
                run_launch(this, forgiven)
                tested = evaluate_best(this)
            return publish_report(this, tested)
    except EngineError as error:
        return cast(Report, failed(error))


def prepare_deployed_run(job: TrainingJob) -> None:
    """Tag this run; if a deployment asked for it, refuse what holds in one folder only, let it outlive its worker.

    Raises:
        JobError: with every relative path.
    """
    tag_run()
    if not deployment.id:
        return
    if faults := relative_paths(job):
        raise JobError.of(f"job {job.name}", faults)
    detach()
    hide_engine_tracebacks()


def attempts_so_far(run: Run) -> int:
    """Return how many attempts of `run` are forgiven: all, since to start a flow is to ask for another try.

    What the server's automation started again no person has asked for: there none are.

    Raises:
        RunCancelled: it was cancelled.
        WorldError: the automation would go on for ever with attempts that bring no newer snapshot.
    """
    automatic = is_automatic_retry()
    with run.store.errors_explained("read"):
        if automatic:  # its server, or its machine, may have ended the launcher; else a new attempt does it
            recover_orphaned_attempts(run)
        tried = run.attempts.attempts()
    if not automatic:
        return tried[-1].number if tried else 0
    verdict = run.attempts.verdict(run.job.retries_without_progress)
    if tried and tried[-1].failed and not verdict.retry:
        raise WorldError(f"the run crashed, and the automation does not resume it again: {verdict.reason}. Retry does.")
    return 0


def run_prepare(job: TrainingJob) -> Manifest:
    """Have the job's data prepared; return the manifest of data that are there."""
    manifest = prepare_data(job)
    if is_unchanged(manifest):
        return manifest
    return prepare_data.with_options(refresh_cache=True)(job)  # it came from a cache, the data are gone


def run_launch(run: Run, forgiven: int) -> None:
    """Train `run` to its end; where that fails, report what came of it."""
    try:
        launch_world(run, after=forgiven)
    except Exception:
        publish_report(run)
        raise
