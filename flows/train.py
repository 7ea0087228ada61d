"""The flow that trains: prepare, launch, evaluate, report. It survives whatever stops it."""

from prefect import flow
from prefect.runtime import deployment, flow_run

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError
from midstride.engine.jobs.portability import relative_paths
from midstride.engine.runs.report import Report
from midstride.engine.runs.run import Run
from midstride.engine.storage.listing import Manifest, is_unchanged
from midstride.flows.detach import detach
from midstride.flows.log_filters import hide_engine_tracebacks
from midstride.tasks.credentials import credentials_of
from midstride.tasks.evaluate import evaluate_best
from midstride.tasks.launch import launch_world
from midstride.tasks.prepare import prepare_data
from midstride.tasks.report import publish_report, tell_stopped

__all__ = ["as_deployed", "attempts_so_far", "run_launch", "run_prepare", "train"]


@flow(name="train")
def train(job: TrainingJob, run: str | None = None) -> Report:
    """Train `job` to its end and report what came of it.

    Started again with the same run (a retry of this flow run, or the same name), it picks up where it stopped.

    Args:
        job: what is trained, on what, how and where.
        run: name of the run; the flow run's id if empty.
    """
    as_deployed(job)
    name = run or str(flow_run.id)
    with credentials_of(job):
        forgiven = attempts_so_far(job, name)
        run_prepare(job)
        run_launch(job, name, forgiven)
        return publish_report(job, name, evaluate_best(job, name))


def as_deployed(job: TrainingJob) -> None:
    """Where a deployment asked for this run, refuse what holds in one folder only, and let it outlive its worker.

    Raises:
        JobError: with every relative path.
    """
    if not deployment.id:
        return
    if faults := relative_paths(job):
        raise JobError.of(f"job {job.name}", faults)
    detach()
    hide_engine_tracebacks()


def attempts_so_far(job: TrainingJob, run: str) -> int:
    """Return how often `run` was attempted: to start a flow is to ask for another try, with those known."""
    this = Run(job, run)
    with this.store.errors_explained("read"):
        tried = this.attempts.attempts()
    return tried[-1].number if tried else 0


def run_prepare(job: TrainingJob) -> Manifest:
    """Have the job's data prepared; return the manifest of data that are there."""
    manifest = prepare_data(job)
    if is_unchanged(manifest):
        return manifest
    return prepare_data.with_options(refresh_cache=True)(job)  # it came from a cache, the data are gone


def run_launch(job: TrainingJob, run: str, forgiven: int) -> None:
    """Train `run` to its end; where that fails, report what came of it."""
    try:
        launch_world(job, run, after=forgiven)
    except Exception:
        publish_report(job, run)
        raise
    except BaseException:  # asked to stop: no task begins any more
        tell_stopped(job, run)
        raise
