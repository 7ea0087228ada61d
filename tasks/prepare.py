"""Prefect task: make the data, once for a run however often its flow is retried."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import INPUTS, RUN_ID

from midstride.engine.config.job import TrainingJob
from midstride.engine.jobs.operations import run_operation
from midstride.engine.runs.run import Run

__all__ = ["prepare_data"]


# Without TASK_SOURCE: a hot fix of the code does not make data again that took hours.
@task(
    name="prepare data",
    task_run_name="prepare data",
    persist_result=True,
    cache_policy=INPUTS + RUN_ID,
    result_serializer="json",
)
def prepare_data(job: TrainingJob) -> dict[str, Any]:
    """Have the job's data module prepare its data; return a small manifest of them.

    A retry of the flow gets the manifest from the cache, so the caller checks with
    `midstride.engine.storage.listing.is_unchanged` whether the data are, too.
    """
    manifest: dict[str, Any] = run_operation("prepare", Run(job, job.name), on_line=get_run_logger().info)
    return manifest
