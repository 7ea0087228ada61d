"""Prefect task: what the best weights of a run are worth."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from midstride.engine.jobs.operations import run_operation
from midstride.engine.runs.run import Run

__all__ = ["evaluate_best"]


@task(name="evaluate best", task_run_name="evaluate best", cache_policy=NO_CACHE)
def evaluate_best(run: Run) -> dict[str, float]:
    """Test the best weights of `run` (the last, if none were called best); return the values."""
    values: dict[str, float] = run_operation("evaluate", run, on_line=get_run_logger().info)
    return values
