"""Prefect task: run one training world to its end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.runtime import deployment, flow_run

from midstride.engine.errors import JobError, SnapshotError, StopRequested, Superseded, UserError, WorldError
from midstride.engine.launch.launch import launch
from midstride.engine.runs.cause import cause_of
from midstride.engine.runs.forked_job import as_forked
from midstride.engine.runs.run import Run, job_of
from midstride.engine.session.attempts import Verdict
from midstride.engine.session.outcome import raise_for_outcome
from midstride.engine.storage.listing import FolderListing
from midstride.tasks.assets import weights_materialized
from midstride.tasks.detach import detach
from midstride.tasks.job_argument import JobLike, run_of
from midstride.tasks.monitor import RunMonitor, warn
from midstride.tasks.slots import slots_claimed
from midstride.tasks.stop_requests import is_paused, stop_if_asked

__all__ = ["launch_world"]

#: The attempt log ends it, not this number: it counts attempts without progress, Prefect can only count attempts.
_RETRIES = 10_000
_DELAYS_S: list[float] = [1, 2, 5, 10, 20, 30]  # the last one repeats

_training: set[str] = set()
_training_lock = threading.Lock()


def _may_resume(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return True if another attempt can help.

    A plain function, because Prefect ignores other callables.
    """
    context, error = TaskRunContext.get(), state.data
    # Who takes a run back that another flow has taken over loses it again: neither would get on.
    if context is None or isinstance(error, (UserError, Superseded)) or is_paused():
        return False
    given = context.parameters
    run = run_of(given["job"], given["run"])
    patience = run.job.retries_without_progress
    if isinstance(error, (WorldError, StopRequested)):
        verdict = run.attempts.verdict(patience, after=_forgiven(run, given["after"], task_run.run_count))
    else:  # no world came to be: the store or this machine has a problem
        count, most = task_run.run_count, patience + 1
        verdict = Verdict(count < most, f"attempt {count} of {most} to launch a world")
    warn(f"{cause_of(str(error))}\n{'trying again' if verdict.retry else 'giving up'}: {verdict.reason}")
    return verdict.retry


def _forgiven(run: Run, after: int | None, tries: int) -> int:
    """Return the last forgiven attempt, by default the one before this task run's `tries`."""
    if after is not None:
        return after
    tried = run.attempts.attempts()
    return max(0, tried[-1].number - tries) if tried else 0


@task(
    name="launch world",
    task_run_name="launch world",
    cache_policy=NO_CACHE,
    retries=_RETRIES,
    retry_delay_seconds=_DELAYS_S,
    retry_condition_fn=_may_resume,
)
def launch_world(
    job: JobLike,
    run: str | None = None,
    data: FolderListing | None = None,
    after: int | None = None,
    take_over: bool = False,
) -> int | None:
    """Train until the run is done and return its last step.

    A retry resumes from the newest committed snapshot. A run that is done with this very job is not started again.
    Call the task directly or by `submit` or `map`: a request to stop reaches the training in any thread.

    Args:
        job: a job, the path of its file, or its document.
        run: name of the run; by default one that a retry of the flow finds again.
        data: what `prepare_data` returned, from which the weights are made in Prefect's assets.
        after: attempts up to this number do not count as failed; by default, those before this task run.
        take_over: take the run from another process that trains it now; else that is an error, unless the flow or the
            task is retried.

    Raises:
        RunHeld: another process on this machine trains the run.
        UserError: the job or the user's code is wrong, or this process trains that run already.
        WorldError: attempts end without a newer snapshot.
        SnapshotError: the store does not answer.
    """
    stop_if_asked()
    this = as_forked(run_of(job, run))
    if deployment.id:
        detach()
    with _trained_once(this):
        if (step := _last_step_if_done(this)) is None:
            step = _train(this, take_over or _is_retry())
    with suppress(SnapshotError):  # a store that does not answer now makes no training fail that is done
        weights_materialized(this, data)
    return step


def _train(run: Run, take_over: bool) -> int | None:
    """Train `run` to its end and return its last step."""
    with slots_claimed(run.job), RunMonitor(run) as monitor:
        outcome = launch(
            run,
            on_line=monitor.line,
            on_event=monitor.event,
            stop_if_asked=stop_if_asked,
            take_over=take_over,
        )
    raise_for_outcome(outcome)
    return outcome.step


def _is_retry() -> bool:
    """Whether this task or a flow around it is a retry.

    Its earlier process can still be ending.
    """
    task = TaskRunContext.get()
    return task is not None and (task.task_run.run_count > 1 or flow_run.run_count > 1)


def _last_step_if_done(run: Run) -> int | None:
    """Return the last step of a completed run of this job; None of other runs."""
    with run.store.errors_explained("read"):
        tried = run.attempts.attempts()
        last = tried[-1] if tried else None
        # A stop that came after its end is in its record: another attempt, with nothing to train, clears it.
        if last is None or last.outcome != "done" or last.stopped is not None or (before := job_of(run.store)) is None:
            return None
    return last.step if before.model_dump(mode="json") == run.job.model_dump(mode="json") else None


@contextmanager
def _trained_once(run: Run) -> Iterator[None]:
    """Refuse to train a run in two threads of this process: each would take it from the other."""
    with _training_lock:
        if run.url in _training:
            raise JobError(f"this process trains run {run.name} already: give the other training a name, run=...")
        _training.add(run.url)
    try:
        yield
    finally:
        with _training_lock:
            _training.remove(run.url)
