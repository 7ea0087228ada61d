"""Events for automations: one class each, whose fields are the payload. See docs/events.md."""

from typing import ClassVar

from prefect.events import emit_event
from pydantic import BaseModel, ConfigDict, Field

from midstride.tasks.resources import resource

__all__ = [
    "EVENTS",
    "Event",
    "ModelPromoted",
    "ModelRolledBack",
    "RoundBegun",
    "RunFailed",
    "RunFinished",
    "RunResumed",
    "RunStopped",
    "SnapshotCommitted",
    "StoreAwaited",
    "emit",
]


class Event(BaseModel):
    """Payload of all events; the resource is the run, `midstride.run.NAME`."""

    model_config = ConfigDict(frozen=True)

    #: "midstride.<noun>.<past tense>"
    event: ClassVar[str]
    run: str = Field(description="URL of the run, with snapshots, weights and report.md.")


class RunResumed(Event):
    """A run has resumed from a snapshot."""

    event = "midstride.run.resumed"

    generation: int = Field(description="Number of the attempt's lease: 1, and one more with each resume.")
    snapshot: str = Field(description="Name of the snapshot from which the run resumed.")
    step: int = Field(description="Optimizer steps at that snapshot.")


class RoundBegun(Event):
    """A new set of machines trains from now on."""

    event = "midstride.round.begun"

    number: int = Field(description="Number of the round, from 1 in each attempt.")
    nodes: list[str] = Field(description="Host names of the nodes that train.")
    ranks: int = Field(description="Number of their ranks.")
    why: str = Field(description="Why the previous round ended; empty for the first.")


class SnapshotCommitted(Event):
    """A snapshot is complete in the store. Events are sent together, at most every ten seconds."""

    event = "midstride.snapshot.committed"

    name: str = Field(description="Name of the snapshot.")
    step: int = Field(description="Optimizer steps at that snapshot.")
    bytes: int = Field(description="Size in bytes.")
    stall_s: float = Field(description="Seconds for which training waited.")
    epoch: int = Field(description="Epoch of that step, from 0.")
    wait_s: float = Field(description="Seconds of these spent waiting for the previous snapshot.")
    write_s: float = Field(description="Seconds from the copy to the commit, during training.")
    state: str = Field(description="Files and sizes found in the store, or that it has been pruned since.")


class StoreAwaited(Event):
    """The store does not answer or is too slow. Sent at most every thirty seconds."""

    event = "midstride.store.awaited"

    rank: int = Field(description="Rank that waits.")
    waited_s: float = Field(description="Seconds waited so far.")
    why: str = Field(description="Error of the store.")


class RunFinished(Event):
    """The training is complete and its best weights are tested."""

    event = "midstride.run.finished"

    job: str = Field(description="Name of the job.")
    steps: int = Field(description="Optimizer steps taken.")
    restarts: int = Field(description="Number of resumes.")
    test: dict[str, float] = Field(description="Results of the test of the best weights.")
    ended_by: str = Field(description="Reason of the end: max_epochs, max_steps, early_stopping or callback.")
    why: str = Field(description="The same, as a sentence.")


class RunStopped(Event):
    """The run was stopped early, on request or by a newer attempt. A retry resumes."""

    event = "midstride.run.stopped"

    job: str = Field(description="Name of the job.")
    cause: str = Field(description="Who asked for the stop, in one line.")
    steps: int = Field(description="Optimizer steps taken.")


class RunFailed(Event):
    """The last attempt has failed. Remove the cause, then retry the flow run."""

    event = "midstride.run.failed"

    job: str = Field(description="Name of the job.")
    outcome: str = Field(description="user_error: the job or its code is wrong; died or lost: its surroundings failed.")
    cause: str = Field(description="Cause in one line.")
    steps: int = Field(description="Optimizer steps taken.")


class ModelPromoted(Event):
    """A challenger is the new champion. The resource is the model, `midstride.model.NAME`."""

    event = "midstride.model.promoted"

    run: str = Field(description="Name of the run with the champion's weights.")
    weights: str = Field(description="Folder of the weights, for load_from_checkpoint.")
    date: str = Field(description="Date of the training data.")
    why: str = Field(description="Reason, with both values.")
    metric: str = Field(description="Name of the deciding value.")
    mode: str = Field(description="min or max: the better of two values.")
    margin: float = Field(description="Required difference.")
    challenger: dict[str, float] = Field(description="Test results of the challenger.")
    champion: dict[str, float] = Field(description="Test results of the previous champion; empty at first.")
    over: int | None = Field(description="Number of the previous champion; null at first.")


class ModelRolledBack(Event):
    """A rollback has restored the previous champion. The resource is the model."""

    event = "midstride.model.rolled_back"

    run: str = Field(description="Name of the run with the champion's weights.")
    weights: str = Field(description="Folder of the weights, for load_from_checkpoint.")
    after: str = Field(description="Name of the run with the previous champion's weights.")


EVENTS: tuple[type[Event], ...] = (
    RunResumed,
    RoundBegun,
    SnapshotCommitted,
    StoreAwaited,
    RunFinished,
    RunStopped,
    RunFailed,
    ModelPromoted,
    ModelRolledBack,
)


def emit(event: Event, about: dict[str, str] | None = None) -> None:
    """Send an event to Prefect's server in the background, within a fraction of a millisecond.

    Args:
        event: event with its payload.
        about: resource of the event; the run if empty.
    """
    emit_event(event.event, resource=about or resource(event.run), payload=event.model_dump(mode="json"))
