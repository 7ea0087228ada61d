"""What a self-hosted Prefect server lacks for unattended runs: `midstride setup-server` adds it."""

from datetime import timedelta

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

__all__ = ["CRASH_RETRY", "ZOMBIES", "create_pool", "ensure_automations"]

#: the names of the automations
ZOMBIES = "midstride: a flow run without a heartbeat has crashed"
CRASH_RETRY = "midstride: a flow run that crashed resumes"

_BEATS_MISSED = 3
_LONGEST_RUN = timedelta(days=90)
_HEARTBEAT = "prefect.flow-run.heartbeat"
#: the server's events of a state go by its name, not by its type
_ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", PROMOTED, KEPT, "Failed", "Cancelled", "Crashed")}


def ensure_automations(within_s: float | None = None) -> list[str]:
    """Have the server look after runs that cannot do so themselves; return what was done, a line for each automation.

    A run whose process is gone with its worker stays Running for ever otherwise: it cannot be retried, and it keeps the
    place of the nights after it. A run that has crashed is scheduled again; the flow gives up where its attempts
    bring no newer snapshot. Only runs of our own deployments are looked after.

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
        ]


def _ensure(client: SyncPrefectClient, wanted: AutomationCore, meaning: str) -> str:
    """Have one automation of that name, as wanted; return what was done and what it means."""
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
    """Create the work pool `name` where it is missing; return what was done, as text.

    Raises:
        JobError: there is a pool of that name and of another kind.
    """
    with get_client(sync_client=True) as client:
        try:
            found = client.read_work_pool(name)
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=name, type=kind))
            return f"pool created: {name}, {kind}; work for it: prefect worker start --pool {name}"
    if found.type != kind:
        raise JobError(
            f"--pool {name}: is there, and it is a {found.type} pool, not a {kind} pool: choose another name"
        )
    return f"pool is there: {name}, {kind}"


def _zombies(within_s: float) -> AutomationCore:
    return AutomationCore(
        name=ZOMBIES,
        description="Made by `midstride setup-server`, which may be run again at any time.",
        trigger=EventTrigger(
            after={_HEARTBEAT},
            expect={_HEARTBEAT, *_ENDS},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=within_s),
        ),
        actions=[
            ChangeFlowRunState(
                name=None,
                force=False,
                state=StateType.CRASHED,
                message=f"No heartbeat for {within_s:g} s: its worker and its process are gone. Retry resumes it.",
            )
        ],
    )


def _crash_retry() -> AutomationCore:
    return AutomationCore(
        name=CRASH_RETRY,
        description="Made by `midstride setup-server`, which may be run again at any time.",
        trigger=EventTrigger(
            after={"prefect.flow-run.Running"},  # one that crashed before it began would crash again, for ever
            expect={"prefect.flow-run.Crashed"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=_LONGEST_RUN,
        ),
        # The server refuses that for runs without a deployment: no worker would take them up.
        actions=[
            ChangeFlowRunState(name="AwaitingRetry", force=False, state=StateType.SCHEDULED, message=AUTOMATIC_RETRY)
        ],
    )


def _same(there: Automation, wanted: AutomationCore) -> bool:
    """Whether the server has what is wanted; the identities it adds tell nothing."""
    first, second = (one.model_dump(exclude={"id": True, "trigger": {"id"}}) for one in (there, wanted))
    return all(first[key] == value for key, value in second.items())
