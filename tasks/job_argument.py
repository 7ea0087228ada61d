"""Shared arguments of tasks and flows: a job in any form, and the name of its run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from prefect.runtime import flow_run
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from midstride.engine.config.arguments import map_texts
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.validation import validation_errors
from midstride.engine.errors import JobError
from midstride.engine.runs.run import Run
from midstride.tasks.job_form import folded

__all__ = ["JobLike", "as_job", "default_run_name", "run_of"]

#: options of a job that say where and how its run is kept, and change nothing of the training
_OPERATION = {
    "accept_change",
    "folder",
    "loggers",
    "nightly",
    "resources",
    "retries_without_progress",
    "snapshots",
}


class _AsJob:
    """Validates a flow's parameter: a path is loaded, other values are a job."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_loaded, handler.generate_schema(TrainingJob))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return folded(handler(core), handler.resolve_ref_schema)


#: a job, the path of its YAML file, or its document
JobLike: TypeAlias = Annotated[TrainingJob | Path | str | Mapping[str, Any], _AsJob()]


def as_job(job: JobLike) -> TrainingJob:
    """Return `job` as a `TrainingJob`.

    Args:
        job: a job; the path of its YAML file; or a dict as that file has it, with paths relative to this process.

    Raises:
        JobError: with every fault of the file or the dict.
    """
    job = _loaded(job)
    if isinstance(job, TrainingJob):
        return job
    try:
        return TrainingJob.model_validate(job)
    except ValidationError as error:
        raise JobError.of("the job", validation_errors(error, TrainingJob)) from error


def run_of(job: JobLike, run: str | None) -> Run:
    """Return the run of `job` called `run`, or by `default_run_name` if that is empty."""
    job = as_job(job)
    return Run(job, run or default_run_name(job))


def default_run_name(job: TrainingJob) -> str:
    """Return the run name of `job` in this flow, equal in all retries and tasks.

    It consists of the id of the outermost flow run, the name of the job, and a digest of the training. So each fold
    or setting has its own run, and a retry finds it. A subflow has another id in each retry of its parent.

    Raises:
        JobError: no flow runs here.
    """
    root = flow_run.root_flow_run_id
    if not root:
        raise JobError("a run outside of a flow has no default name: pass run=...")
    return f"{root}-{job.name}-{_digest(job)}"


def _digest(job: TrainingJob) -> str:
    trained = job.model_dump(mode="json", exclude=_OPERATION)
    if job.folder:  # a worker can have another copy of the code
        trained = map_texts(trained, lambda text: text.replace(job.folder, "."))
    return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()[:8]


def _loaded(job: Any) -> Any:
    return TrainingJob.load(job) if isinstance(job, (str, Path)) else job
