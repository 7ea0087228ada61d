"""Evaluation flow: test the weights of a run, also while another flow trains it."""

from typing import Annotated, cast

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from pydantic import Field

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError
from midstride.engine.formatting import format_number, format_run_name, markdown_table
from midstride.engine.registry.nightly import date_errors
from midstride.engine.runs.run import Run, check_there
from midstride.flows.run_states import cancelled_if_paused, completed, evaluation_name, failed
from midstride.flows.train import prepare_deployed_run
from midstride.tasks.credentials import credentials_of
from midstride.tasks.evaluate import evaluate_best
from midstride.tasks.job_argument import JobLike, as_job
from midstride.tasks.resources import artifact_key
from midstride.tasks.server_outage import await_server

__all__ = ["evaluate"]

RunName = Annotated[str, Field(title="Run", description="Name of the run to test; it can be in training.")]
Step = Annotated[
    int | None,
    Field(title="Step", description="Step of the snapshot to test; if empty, the best weights, else the last."),
]


@flow(name="evaluate", flow_run_name=evaluation_name)
def evaluate(job: JobLike, run: RunName, step: Step = None) -> dict[str, float]:
    """Test the weights of a run on the job's test data and return the values by name.

    The run can be in training meanwhile: nothing of it changes.

    Args:
        job: a job, or the path of its file.
        run: name of the run to test.
        step: of the snapshot to test; if empty, the best weights so far, or the last without best ones.
    """
    try:
        with cancelled_if_paused():
            tested = _evaluate(as_job(job), run, step)
    except EngineError as error:
        return cast(dict[str, float], failed(error))
    return completed(tested, "Completed", _headline(step, tested))


def _evaluate(job: TrainingJob, run: str, step: int | None) -> dict[str, float]:
    prepare_deployed_run(job)
    if faults := date_errors(job):
        raise JobError.of(f"job {job.name}", faults)
    with credentials_of(job):
        this = Run(job, run)
        with this.store.errors_explained("read"):
            check_there(this.store)
        tested = evaluate_best(job, run, step)
    if await_server():
        rows = [(name, format_number(value)) for name, value in tested.items()]
        create_markdown_artifact(
            f"{this.url}: {_what(step)}\n\n{markdown_table(('test', 'value'), rows)}",
            key=artifact_key(this.url, "test"),
            description=f"{job.name}, run {format_run_name(run)}: {_headline(step, tested)}",
        )
    return tested


def _headline(step: int | None, tested: dict[str, float]) -> str:
    values = ", ".join(f"{name} {format_number(value)}" for name, value in tested.items())
    return f"{_what(step)}: {values or 'the module has no test_step'}"


def _what(step: int | None) -> str:
    return "best weights" if step is None else f"snapshot of step {step}"
