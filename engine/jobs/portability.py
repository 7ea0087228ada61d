"""Parts of a job that would fail in the folder and process of a deployment."""

from typing import Any

from midstride.engine.config.arguments import texts_in
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError
from midstride.engine.jobs.operations import run_operation
from midstride.engine.runs.run import Run

__all__ = ["portability_errors", "relative_paths"]


def relative_paths(job: TrainingJob) -> list[str]:
    """Return a message for every path of `job` that depends on a process's working folder.

    A job that was loaded from a file has none; one that was typed into a form may.
    """
    paths = [("folder", job.folder or ".")]
    if job.snapshots is not None:
        paths.append(("snapshots.url", job.snapshots.url))
    if job.weights is not None:
        paths.append(("weights", job.weights))
    groups: dict[str, Any] = {"args": [*job.args], "module_args": job.module_args, "data_args": job.data_args}
    groups |= {f"callbacks.{number}.args": callback.args for number, callback in enumerate(job.callbacks)}
    groups |= {f"loggers.{number}.args": logger.args for number, logger in enumerate(job.loggers)}
    for group, arguments in groups.items():
        paths += [(key, text) for key, text in texts_in(arguments, group) if text.startswith(("./", "../"))]
    return [
        f"{key}: {text!r} is relative, and each run of a deployment starts in its own folder: write an absolute "
        f"path, or a URL"
        for key, text in paths
        if "://" not in text and not text.startswith("/")
    ]


def portability_errors(job: TrainingJob, *, nightly: bool = False) -> list[str]:
    """Return parts of `job` that work here and would fail in a deployment.

    The code of the job is imported in a process without the current folder and PYTHONPATH of this shell. With
    `nightly`, the flow that would be deployed is the nightly one.
    """
    faults = relative_paths(job)
    try:
        built = run_operation("build", Run(job, job.name), on_line=lambda text: None, without=("PYTHONPATH",))
        if nightly and not built["can be tested"]:
            faults.append(f"module: {job.module} has no test_step, so challengers cannot be compared")
    except EngineError as error:
        faults.append(f"{error}\n  it is importable from here only: put it into {job.folder}, or install it")
    return faults
