"""Prefect task: whether a challenger takes the champion's place."""

from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from midstride.engine.errors import Overtaken, WorldError
from midstride.engine.jobs.operations import run_operation
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.nightly import NightlyRun
from midstride.engine.storage.listing import Manifest
from midstride.tasks.events import ModelPromoted, emit
from midstride.tasks.resources import model

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
def compare_and_promote(night: NightlyRun, data: Manifest) -> PromotionDecision:
    """Compare the night's run with the champion on the same test data; promote it if it is better.

    Another night may promote meanwhile: then this one is told, and compares again, with the new champion.

    Args:
        night: whose run is done.
        data: what it was trained on.
    """
    compared = run_operation("compare", night.run, on_line=get_run_logger().info)
    decision = night.decide(compared)
    champion = night.registry.current() if decision.promoted else None
    if champion is not None and champion.run == night.run.name:  # else rolled back, or another is in charge by now
        # Before the night is closed: an automation hears of it once more rather than not at all.
        why = decision.model_dump(exclude={"promoted"})
        promoted = ModelPromoted(
            run=night.run.name, weights=night.registry.weights_url(champion), date=night.date, **why
        )
        emit(promoted, model(night.job.name))
    if night.job.loggers:
        _publish(night)
    night.close(decision, data)
    return decision


def _publish(night: NightlyRun) -> None:
    """Tell the trackers whose weights are in charge; one that is away ends no night."""
    log = get_run_logger()
    try:
        errors = run_operation("publish", night.run, on_line=log.info)
    except WorldError as error:
        errors = [f"loggers were not told who is champion of {night.job.name}, the next night tells them: {error}"]
    for message in errors:
        log.warning(message)
