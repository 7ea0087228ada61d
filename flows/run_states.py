"""A flow run in Prefect's lists: its name, tag and final state."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError
from midstride.engine.runs.cause import cause_of
from midstride.tasks.job_argument import as_job
from midstride.tasks.server_outage import ensure_server_hears
from midstride.tasks.stop_requests import is_paused

__all__ = [
    "AUTOMATIC_RETRY",
    "KEPT",
    "PROMOTED",
    "TAG",
    "RunCancelled",
    "cancelled_if_paused",
    "completed",
    "evaluation_name",
    "failed",
    "is_automatic_retry",
    "nightly_name",
    "tag_run",
    "train_name",
]

#: every flow run of ours has it: filters and automations know them by it
TAG = "midstride"

#: the names under which a night that came to its end is Completed
PROMOTED, KEPT = "Promoted", "Kept"

#: the message of the state in which the server's automation schedules a crashed run again
AUTOMATIC_RETRY = "It crashed; midstride's automation has it resume"

#: name of the state of a run that waits for its deployment's concurrency limit
_WAITS_ITS_TURN = "AwaitingConcurrencySlot"

Result = TypeVar("Result")


class RunCancelled(EngineError):
    """The run was cancelled: it is not to train."""


def train_name() -> str:
    """Return the name of a run of the flow `train`: job and run, or job and start."""
    parameters = flow_run.parameters
    return _name(as_job(parameters["job"]), parameters.get("run") or _start("%Y-%m-%d %H:%M"))


def evaluation_name() -> str:
    """Return the name of a run of the flow `evaluate`: job, run and step."""
    parameters = flow_run.parameters
    at = "" if (step := parameters.get("step")) is None else f" step {step}"
    return _name(as_job(parameters["job"]), f"test of {parameters['run']}{at}")


def nightly_name() -> str:
    """Return the name of a run of the flow `nightly`: job and date."""
    parameters = flow_run.parameters
    return _name(as_job(parameters["job"]), f"nightly {parameters.get('date') or _start('%Y-%m-%d')}")


def _name(job: TrainingJob, rest: str) -> str:
    named = str(flow_run.name)
    return named if named.startswith(f"{job.name} ") else f"{job.name} {rest}"  # a retry keeps its name


def _start(pattern: str) -> str:
    return str(flow_run.scheduled_start_time.astimezone().strftime(pattern))


def tag_run() -> None:
    """Give this flow run our tag, where its deployment has not."""
    if TAG not in (tags := list(flow_run.tags)):
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, tags=[*tags, TAG])


def is_automatic_retry() -> bool:
    """Return True if the server's automation started this attempt, not a person or a schedule.

    While another run has its deployment's place, the server schedules it anew again and again, and asks for nothing.

    Raises:
        RunCancelled: the automation did, of a run that a person has cancelled: where a worker, late, told of the end as
            of a crash, the server takes it for one.
    """
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(str(flow_run.id)))
    asked = [state for state in states if state.is_scheduled() and state.name != _WAITS_ITS_TURN]
    if not asked or asked[-1].message != AUTOMATIC_RETRY:
        return False
    before = takewhile(lambda state: not state.is_running(), reversed(states[: states.index(asked[-1])]))
    if any(state.is_cancelling() for state in before):
        raise RunCancelled("It was cancelled, but its worker reported a crash. Retry resumes it.")
    return True


def completed(result: Result, name: str, message: str) -> Result:
    """Return a flow result that ends it Completed under another name. Its caller gets `result`.

    Raises:
        ServerLost: Prefect's server does not answer.
    """
    ensure_server_hears(result)
    return cast(Result, Completed(name=name, message=message, data=result))


@contextmanager
def cancelled_if_paused() -> Iterator[None]:
    """End a subflow as Cancelled if the flow around it is paused. Resume starts another subflow.

    Prefect would leave it Running.
    """
    try:
        yield
    finally:
        if is_paused() and flow_run.parent_flow_run_id:
            paused: State[Any] = Cancelled(
                message="The flow around it was paused. Resume continues from the last snapshot."
            )
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(str(flow_run.id)), paused, force=True)


def failed(error: EngineError) -> Any:
    """Return a flow's result that ends it Failed with the cause. Its caller raises `error`.

    A cancelled run ends Cancelled.

    A flow with retries of Prefect's own has `error` raised here: it tries again after exceptions only.

    Raises:
        ServerLost: Prefect's server does not answer.
    """
    ensure_server_hears(error)
    if isinstance(error, RunCancelled):
        return Cancelled(message=str(error))
    context = FlowRunContext.get()
    if context is not None and context.flow is not None and context.flow.retries:
        raise error
    text, cause = str(error), cause_of(str(error))
    begins_with_cause = cause.startswith(text.partition("\n")[0])  # a cause may be its first lines joined
    return Failed(message=text if begins_with_cause else f"{cause}\n\n{text}", data=error)
