"""Prefect task: prepare the data, once for a flow run however often it is retried."""

import itertools
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.context import TaskRunContext
from prefect.runtime import flow_run
from prefect.utilities.hashing import hash_objects

from midstride.engine.jobs.operations import run_operation
from midstride.engine.runs.run import Run
from midstride.engine.storage.listing import FolderListing, is_unchanged
from midstride.tasks.assets import data_materialized
from midstride.tasks.job_argument import JobLike, as_job
from midstride.tasks.stop_requests import stop_if_asked

__all__ = ["prepare_data"]


def _cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Return the key of a manifest whose data are still there, or one that no manifest has.

    It has the outermost flow run in it, which is the same in each retry, and not the source of the task: a hot fix does
    not prepare data again that took hours.
    """
    key = hash_objects(flow_run.root_flow_run_id, as_job(parameters["job"]).model_dump(mode="json"))
    store = context.result_store
    for number in itertools.count():
        numbered = f"{key}-{number}"
        if not store.exists(numbered) or is_unchanged(store.read(numbered).result):
            return numbered
    raise AssertionError("a count does not end")


@task(
    name="prepare data",
    task_run_name="prepare data",
    persist_result=True,
    cache_policy=CacheKeyFnPolicy(cache_key_fn=_cache_key),
    result_serializer="json",
)
def prepare_data(job: JobLike) -> FolderListing:
    """Run `prepare_data` of the job's data module; return a small manifest of the data.

    A retry of the flow gets the manifest from Prefect's cache, as long as the data have the same names and sizes.

    Args:
        job: a job, the path of its file, or its document.

    Raises:
        UserError: the job or the user's code is wrong.
        WorldError: the process died.
    """
    job = as_job(job)
    manifest: FolderListing = run_operation(
        "prepare", Run(job, job.name), on_line=get_run_logger().info, stop_if_asked=stop_if_asked
    )
    data_materialized(manifest)
    return manifest
