"""Events that automations may listen to: one class for each, whose fields are its payload. See docs/events.md."""

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
    """What every event says; its resource is the run, `midstride.run.NAME`."""

    model_config = ConfigDict(frozen=True)

    #: "midstride.<noun>.<past tense>"
    event: ClassVar[str]
    run: str = Field(description="URL of the run, with snapshots, weights and report.md.")


class RunResumed(Event):
    """A world took the run up again from a snapshot."""

    event = "midstride.run.resumed"

    generation: int = Field(description="Number of the attempt's lease: 1, and one more with each resume.")
    snapshot: str = Field(description="Name of the snapshot it goes on from.")
    step: int = Field(description="Optimizer steps taken by then.")


class RoundBegun(Event):
    """Other nodes train from now on than before, in a world on several machines."""

    event = "midstride.round.begun"

    number: int = Field(description="Of the round, from 1 in each attempt.")
    nodes: list[str] = Field(description="Host names of the nodes that train.")
    ranks: int = Field(description="How many ranks they have together.")
    why: str = Field(description="Why the round before ended; empty for the first.")


class SnapshotCommitted(Event):
    """A snapshot is whole in the store, seen from outside; at most every ten seconds, several at once."""

    event = "midstride.snapshot.committed"

    name: str = Field(description="Of the snapshot.")
    step: int = Field(description="Optimizer steps taken by then.")
    bytes: int = Field(description="Its size.")
    stall_s: float = Field(description="Seconds it held training up.")
    epoch: int = Field(description="Of that step, from 0.")
    wait_s: float = Field(description="Seconds of the stall spent waiting for the snapshot before.")
    write_s: float = Field(description="Seconds from the copy to the commit, behind training.")
    state: str = Field(description="What was found: its files and sizes, or that it has been pruned meanwhile.")


class StoreAwaited(Event):
    """The store does not answer, or takes less than is written; at most every thirty seconds."""

    event = "midstride.store.awaited"

    rank: int = Field(description="Who waits.")
    waited_s: float = Field(description="For how many seconds by now.")
    why: str = Field(description="What the store says, or does not say.")


class RunFinished(Event):
    """The training came to its end, and its best weights were tested."""

    event = "midstride.run.finished"

    job: str = Field(description="Name of the job.")
    steps: int = Field(description="Optimizer steps taken.")
    restarts: int = Field(description="How often it was taken up again.")
    test: dict[str, float] = Field(description="What the test of the best weights gave.")


class RunStopped(Event):
    """It was stopped before its end: on request, after a last snapshot, or by a newer attempt. A retry resumes."""

    event = "midstride.run.stopped"

    job: str = Field(description="Name of the job.")
    cause: str = Field(description="Who asked, in a line.")
    steps: int = Field(description="Optimizer steps taken.")


class RunFailed(Event):
    """It gave up: every attempt that makes sense has been made. Retry the flow run once the cause is gone."""

    event = "midstride.run.failed"

    job: str = Field(description="Name of the job.")
    outcome: str = Field(description="user_error: the job or its code is wrong; died or lost: what is around it.")
    cause: str = Field(description="In a line.")
    steps: int = Field(description="Optimizer steps taken.")


class ModelPromoted(Event):
    """A challenger took the champion's place; the resource is the model, `midstride.model.NAME` of the job."""

    event = "midstride.model.promoted"

    run: str = Field(description="Name of the run whose weights are the champion now.")
    weights: str = Field(description="Where they are: a folder that load_from_checkpoint takes.")
    date: str = Field(description="Of the data it was trained on.")
    why: str = Field(description="A sentence with both values.")
    metric: str = Field(description="Name of the value that decided.")
    mode: str = Field(description="min or max: which of two values is better.")
    margin: float = Field(description="By how much it had to be better.")
    challenger: dict[str, float] = Field(description="What its test gave.")
    champion: dict[str, float] = Field(description="What the same test of the champion before gave; empty at first.")
    over: int | None = Field(description="Number of the champion before; null at first.")


class ModelRolledBack(Event):
    """The champion before took its place again, by hand; the resource is the model, as for a promotion."""

    event = "midstride.model.rolled_back"

    run: str = Field(description="Name of the run whose weights are the champion now.")
    weights: str = Field(description="Where they are: a folder that load_from_checkpoint takes.")
    after: str = Field(description="Name of the run whose weights were the champion until then.")


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
    """Tell Prefect's server; it is sent from behind, and costs a fraction of a millisecond.

    Args:
        event: what did, and its payload.
        about: the event's resource; the run itself if empty.
    """
    emit_event(event.event, resource=about or resource(event.run), payload=event.model_dump(mode="json"))
