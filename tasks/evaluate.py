"""Prefect task: test the best weights of a run."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from midstride.engine.jobs.operations import run_operation
from midstride.engine.runs.forked_job import as_forked
from midstride.tasks.job_argument import JobLike, run_of
from midstride.tasks.slots import slots_claimed
from midstride.tasks.stop_requests import stop_if_asked

__all__ = ["evaluate_best"]


@task(name="evaluate best", task_run_name="evaluate best", cache_policy=NO_CACHE)
def evaluate_best(job: JobLike, run: str | None = None, step: int | None = None) -> dict[str, float]:
    """Test the best weights of a run, or its last if none are best; return the values by name.

    Args:
        job: a job, the path of its file, or its document.
        run: name of the run; by default that of `launch_world` in this flow.
        step: test the snapshot of this step instead, also while another process trains the run.

    Raises:
        UserError: the job or the user's code is wrong.
        WorldError: the process died.
    """
    this = as_forked(run_of(job, run))
    with slots_claimed(this.job):
        values: dict[str, float] = run_operation(
            "evaluate", this, on_line=get_run_logger().info, stop_if_asked=stop_if_asked, arguments={"step": step}
        )
    return values
