"""Shared arguments of tasks and flows: a job in any form, and the name of its run."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from prefect.runtime import flow_run
from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from midstride.engine.config.arguments import map_texts
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.validation import validation_errors
from midstride.engine.errors import JobError
from midstride.engine.runs.run import Run

__all__ = ["JobLike", "Text", "as_job", "default_run_name", "run_of"]

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

#: a text that can be left out; the UI shows a field for it in place of a choice between text and None
Text: TypeAlias = Annotated[str, BeforeValidator(lambda value: value or "")]


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


Schema = dict[str, Any]

#: option of a job in view -> in a group, its options in view
_IN_VIEW: dict[str, Sequence[str]] = {
    "module_args": (),
    "data_args": (),
    "seed": (),
    "trainer": ("max_epochs", "max_steps", "precision"),
    "world": ("strategy", "processes"),
    "snapshots": ("every_steps",),
    "args": (),
}


def folded(whole: Schema, resolve: Callable[[Schema], Schema]) -> Schema:
    """Return the schema of a job as the UI shows it.

    Args:
        whole: reference to the schema of `TrainingJob`.
        resolve: returns the schema that a reference names.
    """
    properties = resolve(whole)["properties"]
    in_view = {name: _in_view(properties[name], names, resolve) for name, names in _IN_VIEW.items()}
    return {
        "title": "Job",
        "anyOf": [
            {"title": "Basics", "type": "object", "properties": in_view},
            {"title": "All options", "allOf": [whole]},
            {"title": "JSON"},  # it takes any value: `then` checks it, and names the option that is wrong
        ],
        "if": {},
        "then": whole,
    }


def _in_view(option: Schema, names: Sequence[str], resolve: Callable[[Schema], Schema]) -> Schema:
    if not names:
        return option
    group = resolve(_reference(option))
    titles: Schema = {key: option[key] for key in ("title", "description") if key in option}
    return {**titles, "type": "object", "properties": {name: group["properties"][name] for name in names}}


def _reference(option: Schema) -> Schema:
    """Return the reference in the schema of a group, which may be None."""
    alternatives = [option, *option.get("allOf", ()), *option.get("anyOf", ())]
    return next({"$ref": one["$ref"]} for one in alternatives if "$ref" in one)
