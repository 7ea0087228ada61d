"""Prefect task: run one training world to its end."""

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from midstride.engine.errors import StopRequested, Superseded, UserError, WorldError
from midstride.engine.launch.launch import launch
from midstride.engine.runs.cause import cause_of
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import Verdict
from midstride.engine.session.outcome import raise_for_outcome
from midstride.tasks.monitor import RunMonitor, warn

__all__ = ["launch_world"]

#: The attempt log ends it, not this number: it counts attempts without progress, Prefect can only count attempts.
_RETRIES = 10_000
_DELAYS_S: list[float] = [1, 2, 5, 10, 20, 30]  # the last one repeats


def _may_resume(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether another attempt makes sense; a plain function, since Prefect takes any other callable for a no."""
    context, error = TaskRunContext.get(), state.data
    # Who takes a run back that another flow has taken over loses it again: neither would get on.
    if context is None or isinstance(error, (UserError, Superseded)):
        return False
    run: Run = context.parameters["run"]
    patience = run.job.retries_without_progress
    if isinstance(error, (WorldError, StopRequested)):
        verdict = run.attempts.verdict(patience, after=context.parameters["after"])
    else:  # no world came to be: the store or this machine has a problem
        count, most = task_run.run_count, patience + 1
        verdict = Verdict(count < most, f"attempt {count} of {most} to launch a world")
    warn(f"{cause_of(str(error))}\n{'trying again' if verdict.retry else 'giving up'}: {verdict.reason}")
    return verdict.retry


@task(
    name="launch world",
    task_run_name="launch world",
    cache_policy=NO_CACHE,
    retries=_RETRIES,
    retry_delay_seconds=_DELAYS_S,
    retry_condition_fn=_may_resume,
)
def launch_world(run: Run, after: int = 0) -> int | None:
    """Train until the run is done; return its last step.

    A retry resumes: the world looks for the newest committed snapshot itself, so running this twice is the same as
    once. Call it directly, never by `submit`: signals reach the main thread only.

    Args:
        run: what is trained, under its name.
        after: attempts up to this number are forgiven: another try was asked for, with them known.
    """
    with RunMonitor(run) as monitor:
        outcome = launch(run, on_line=monitor.line, on_event=monitor.event)
    raise_for_outcome(outcome)
    return outcome.step
