"""Prefect task: compare a run with the champion, and promote it if it is better."""

from datetime import datetime
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from midstride.engine.errors import JobError, Overtaken, WorldError
from midstride.engine.jobs.operations import run_operation
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.nightly import NightlyRun, nightly_errors
from midstride.engine.storage.listing import FolderListing, list_folder
from midstride.tasks.assets import champion_materialized
from midstride.tasks.events import ModelPromoted, emit
from midstride.tasks.job_argument import JobLike, run_of
from midstride.tasks.resources import model
from midstride.tasks.slots import slots_claimed
from midstride.tasks.stop_requests import stop_if_asked

__all__ = ["compare_and_promote"]


def _was_overtaken(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, Overtaken)


@task(
    name="judge challenger",
    task_run_name="judge challenger",
    cache_policy=NO_CACHE,
    retries=10,
    retry_condition_fn=_was_overtaken,
)
def compare_and_promote(
    job: JobLike, run: str | None = None, data: FolderListing | None = None, date: str | None = None
) -> PromotionDecision:
    """Compare a run with the champion on the same test data. Promote a better one.

    If another run is promoted meanwhile, the task compares again, with the new champion.

    Args:
        job: a job with `monitor`: a job, the path of its file, or its document.
        run: name of the run, which is done; by default that of `launch_world` in this flow.
        data: result of `prepare_data`, recorded with the decision.
        date: of the data; today if empty.

    Raises:
        UserError: the job or the user's code is wrong.
        WorldError: the process died.
    """
    this = run_of(job, run)
    if faults := nightly_errors(this.job):
        raise JobError.of(f"job {this.job.name}", faults)
    night = NightlyRun(this, date or datetime.now().strftime("%Y-%m-%d"))
    with slots_claimed(this.job):
        compared = run_operation("compare", this, on_line=get_run_logger().info, stop_if_asked=stop_if_asked)
    decision = night.decide(compared)
    champion = night.registry.current() if decision.promoted else None
    if champion is not None and champion.run == this.name:  # else rolled back, or another is in charge by now
        # Before the night is closed: an automation hears of it once more rather than not at all.
        why = decision.model_dump(exclude={"promoted", "gates", "failed_gates"})
        promoted = ModelPromoted(run=this.name, weights=night.registry.weights_url(champion), date=night.date, **why)
        emit(promoted, model(this.job.name))
        champion_materialized(this, compared["weights"], data, champion, decision)
    if this.job.loggers:
        _publish(night)
    night.close(decision, data or list_folder(None))
    return decision


def _publish(night: NightlyRun) -> None:
    """Tell the trackers which run is champion; a tracker that does not answer fails nothing."""
    log = get_run_logger()
    try:
        errors = run_operation("publish", night.run, on_line=log.info, stop_if_asked=stop_if_asked)
    except WorldError as error:
        errors = [f"loggers do not know the champion of {night.job.name} yet, the next night sends it: {error}"]
    for message in errors:
        log.warning(message)
