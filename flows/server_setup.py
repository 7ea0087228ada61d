"""Adds automations for unattended runs to a self-hosted Prefect server."""

from datetime import timedelta
from typing import Literal

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from midstride.engine.errors import JobError
from midstride.flows.run_states import AUTOMATIC_RETRY, KEPT, PROMOTED, TAG
from midstride.flows.server import name_faults

__all__ = ["CRASH_RETRY", "LOST_CANCEL", "LOST_RETRY", "ZOMBIES", "create_pool", "ensure_automations"]

#: the names of the automations
ZOMBIES = "midstride: a flow run without a heartbeat has crashed"
CRASH_RETRY = "midstride: a flow run that crashed resumes"
LOST_RETRY = "midstride: a retry that was undone is asked for again"
LOST_CANCEL = "midstride: a cancel that no worker heard is over"

_BEATS_MISSED = 3
_LONGEST_RUN = timedelta(days=90)
_TAKEN_UP_WITHIN = timedelta(seconds=60)
#: a worker that hears of it needs 30 s at most; but where the server lost an event of a run (its SQLite was locked), it
#: reads the later ones 15 min late, and Prefect lets a run that has ended since become Cancelled
_CANCELLED_WITHIN = timedelta(minutes=20)
#: not AwaitingRetry, in which a run waits in its process for retries that its flow has: nothing is undone there
_AWAITS = "AwaitingAutomaticRetry"
_HEARTBEAT = "prefect.flow-run.heartbeat"


def _events(*states: str) -> set[str]:
    """Return the server's events of these states: they go by a state's name, not by its type."""
    return {f"prefect.flow-run.{state}" for state in states}


_ENDS = _events("Completed", PROMOTED, KEPT, "Failed", "Cancelled")


def ensure_automations(within_s: float | None = None) -> list[str]:
    """Add automations for lost runs to the server. Return a line on each.

    Without them, a run whose process and worker are lost stays Running: it cannot be retried, and it blocks the next
    nights. A crashed run is scheduled again; the flow gives up if its attempts bring no newer snapshot. It is scheduled
    once more if a worker's late report of the same death makes the waiting run Crashed again. A run cancelled while it
    waits for its retry would stay Cancelling, because the server takes it for one of its first worker. Only runs of
    midstride's deployments are covered.

    Args:
        within_s: seconds without a heartbeat; three beats as this environment has them, if empty. Flow processes
            beat every `PREFECT_FLOWS_HEARTBEAT_FREQUENCY` seconds (180, 30 at least), by their worker's environment.
    """
    if within_s is None:
        within_s = _BEATS_MISSED * float(get_current_settings().flows.heartbeat_frequency or 180)
    with get_client(sync_client=True) as client:
        return [
            _ensure(client, _zombies(within_s), f"after {within_s:g} s without a heartbeat a run is Crashed"),
            _ensure(client, _crash_retry(), "a run that Crashed is scheduled again, and resumes"),
            _ensure(client, _lost_retry(), "it is scheduled once more if a late report undid that"),
            _ensure(client, _lost_cancel(), "a run that no worker cancels is Cancelled, and can be retried"),
        ]


def _ensure(client: SyncPrefectClient, wanted: AutomationCore, meaning: str) -> str:
    """Ensure the `wanted` automation. Return a line on the change and its meaning."""
    there = client.read_automations_by_name(wanted.name)
    for surplus in there[1:]:
        client.delete_automation(surplus.id)
    if not there:
        client.create_automation(wanted)
        return f"automation created: {meaning}"
    if _same(there[0], wanted):
        return f"automation is there: {meaning}"
    client.update_automation(there[0].id, wanted)
    return f"automation changed: {meaning}"


def create_pool(name: str, kind: str = "process") -> str:
    """Create the work pool `name` if it is missing. Return a line on the change.

    Raises:
        JobError: there is a pool of that name and of another kind, or a pool cannot be called so.
    """
    if faults := name_faults("--pool", name):
        raise JobError(faults[0])
    with get_client(sync_client=True) as client:
        try:
            found = client.read_work_pool(name)
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=name, type=kind))
            return f"pool created: {name}, {kind}; work for it: prefect worker start --pool {name}"
    if found.type != kind:
        raise JobError(f"--pool {name}: exists as a {found.type} pool, not a {kind} pool: choose another name")
    return f"pool is there: {name}, {kind}"


def _automation(
    name: str,
    posture: Literal[Posture.Reactive, Posture.Proactive],
    after: set[str],
    expect: set[str],
    within: timedelta,
    action: ChangeFlowRunState,
) -> AutomationCore:
    """Return an automation that looks at each flow run of ours by itself."""
    return AutomationCore(
        name=name,
        description="Made by `midstride setup-server`, which you can repeat at any time.",
        trigger=EventTrigger(
            after=after,
            expect=expect,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"]}),
            for_each={"prefect.resource.id"},
            posture=posture,
            threshold=1,
            within=within,
        ),
        actions=[action],
    )


def _zombies(within_s: float) -> AutomationCore:
    message = f"No heartbeat for {within_s:g} s: its worker and its process are gone. Retry resumes it."
    return _automation(
        ZOMBIES,
        Posture.Proactive,
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *_ENDS, *_events("Crashed")},
        within=timedelta(seconds=within_s),
        action=ChangeFlowRunState(name=None, force=False, state=StateType.CRASHED, message=message),
    )


def _crash_retry() -> AutomationCore:
    return _automation(
        CRASH_RETRY,
        Posture.Reactive,
        after=_events("Running"),  # one that crashed before it began would crash again, for ever
        expect=_events("Crashed"),
        within=_LONGEST_RUN,
        # The server refuses that for runs without a deployment: no worker would take them up.
        action=_schedule_again(_AWAITS),
    )


def _lost_retry() -> AutomationCore:
    """A process and its worker can both report a death, the second after the retry's request.

    A retry already taken by a worker is excluded: a run that crashes before it starts would crash again for ever. The
    state has another name than the first; otherwise a pool without a worker would reschedule the run each minute.
    """
    return _automation(
        LOST_RETRY,
        Posture.Proactive,
        after=_events(_AWAITS),
        expect={*_ENDS, *_events("Pending", "Running", "AwaitingConcurrencySlot", "Scheduled", "Cancelling")},
        within=_TAKEN_UP_WITHIN,
        action=_schedule_again(None),
    )


def _lost_cancel() -> AutomationCore:
    message = "No worker heard of the cancel. Retry resumes the run, and a process that trains it still stops then."
    return _automation(
        LOST_CANCEL,
        Posture.Proactive,
        after=_events("Cancelling"),
        expect={*_ENDS, *_events("Crashed")},
        within=_CANCELLED_WITHIN,
        action=ChangeFlowRunState(name=None, force=False, state=StateType.CANCELLED, message=message),
    )


def _schedule_again(name: str | None) -> ChangeFlowRunState:
    return ChangeFlowRunState(name=name, force=False, state=StateType.SCHEDULED, message=AUTOMATIC_RETRY)


def _same(there: Automation, wanted: AutomationCore) -> bool:
    """Whether the server has the wanted values, apart from the ids it adds."""
    first, second = (one.model_dump(exclude={"id": True, "trigger": {"id"}}) for one in (there, wanted))
    return all(first[key] == value for key, value in second.items())
