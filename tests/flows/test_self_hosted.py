"""`midstride setup-server`: it may be given again and again, and what it makes does what it is for."""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.events.schemas.automations import Automation
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled
from support.flow_runs import wait_for_effect

from midstride.engine.cli.app import main
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import WorldError
from midstride.engine.runs.run import Run
from midstride.engine.session.outcome import Outcome
from midstride.flows.cli import app
from midstride.flows.deployment import deploy
from midstride.flows.run_states import (
    AUTOMATIC_RETRY,
    KEPT,
    PROMOTED,
    TAG,
    RunCancelled,
    completed,
    failed,
    is_automatic_retry,
)
from midstride.flows.server import ServerError, need_server
from midstride.flows.server_setup import CRASH_RETRY, LOST_CANCEL, LOST_RETRY, ZOMBIES, create_pool, ensure_automations
from midstride.flows.train import attempts_so_far, train

Make = Callable[..., TrainingJob]


@pytest.fixture(autouse=True)
def _clean(server: str) -> Iterator[None]:
    yield
    with get_client(sync_client=True) as client:
        for name in (ZOMBIES, CRASH_RETRY, LOST_RETRY, LOST_CANCEL):
            for one in client.read_automations_by_name(name):
                client.delete_automation(one.id)


def automations() -> list[Automation]:
    with get_client(sync_client=True) as client:
        return client.read_automations_by_name(ZOMBIES)


def test_it_is_made_once_and_changed_when_the_beat_does(server: str) -> None:
    assert [line.partition(":")[0] for line in ensure_automations(540)] == ["automation created"] * 4
    [first] = automations()
    assert first.trigger.match_related.model_dump() == {"prefect.resource.id": [f"prefect.tag.{TAG}"]}
    assert [line.partition(":")[0] for line in ensure_automations(540)] == ["automation is there"] * 4
    assert [one.id for one in automations()] == [first.id]
    assert [line.partition(":")[0] for line in ensure_automations(90)] == [
        "automation changed",
        *["automation is there"] * 3,
    ]
    [changed] = automations()
    assert (changed.id, changed.trigger.within.total_seconds()) == (first.id, 90)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:9/api", "Connection refused"),
        ("127.0.0.1:4200/api", "missing an 'http://' or 'https://' protocol"),
        ("{server}/nowhere", "404 Not Found"),
    ],
)
def test_a_server_that_is_not_there_is_named(server: str, address: str, said: str) -> None:
    address = address.format(server=server)
    with temporary_settings({PREFECT_API_URL: address}), pytest.raises(ServerError) as caught:
        need_server()
    told, remedy = str(caught.value).splitlines()
    assert told.startswith(f"the Prefect server at {address} does not answer: ")
    assert said in told
    assert "set PREFECT_API_URL=" in remedy


def test_the_command_says_what_it_did(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("automation created: after 540 s", "pool created: depot"), ("automation is there", "pool is there"):
        with pytest.raises(SystemExit) as ended:
            main(app, ["setup-server", "--pool", "depot"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        for word in words:
            assert word in shown


def test_an_ended_run_is_not_waited_for(server: str) -> None:
    ensure_automations(540)
    [looks_after] = automations()
    ends = [completed(None, name, "") for name in (PROMOTED, KEPT)] + [Completed(), Failed(), Cancelled(), Crashed()]
    assert {f"prefect.flow-run.{end.name}" for end in ends} <= looks_after.trigger.expect


def test_a_crashed_run_is_scheduled_where_a_worker_takes_it(make_job: Make, server: str) -> None:
    create_pool("crashing")
    deploy(make_job(processes=1), "crashing", pool="crashing")
    ensure_automations(540)
    tried: list[tuple[UUID, UUID]] = []
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("train/crashing")

        def crash() -> None:
            """Crash a run of the deployment and one without; the server keeps a run's later events until it has all."""
            deployed = client.create_flow_run_from_deployment(deployment.id).id
            alone = client.create_flow_run(train, parameters={"job": {}}, tags=[TAG]).id
            assert client.set_flow_run_state(deployed, Pending()).status == SetStateStatus.ACCEPT
            for run, state in product((alone, deployed), (Running(), Crashed())):
                client.set_flow_run_state(run, state, force=True)
            tried.append((deployed, alone))

        def scheduled_again() -> tuple[UUID, UUID] | None:
            runs = (pair for pair in tried if client.read_flow_run(pair[0]).state_name == "AwaitingAutomaticRetry")
            return next(runs, None)

        deployed, alone = wait_for_effect(crash, scheduled_again, "the automation")
        assert client.read_flow_run(deployed).state.message == AUTOMATIC_RETRY
        assert client.read_flow_run(alone).state_name == "Crashed"


def test_what_no_worker_takes_up_is_asked_for_again_or_over(
    make_job: Make, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_TAKEN_UP_WITHIN", "_CANCELLED_WITHIN"):
        monkeypatch.setattr(f"midstride.flows.server_setup.{name}", timedelta(seconds=10))  # Prefect's least
    create_pool("crashing")
    deploy(make_job(processes=1), "crashing", pool="crashing")
    ensure_automations(540)
    awaits = Scheduled(name="AwaitingAutomaticRetry", message=AUTOMATIC_RETRY)
    stories = {
        "a death that is reported twice": (awaits, Crashed()),
        "a process that cannot start": (awaits, Pending(), Crashed()),
        "a cancel before a worker looks": (awaits, Cancelling()),
    }
    tried: list[list[UUID]] = []
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("train/crashing")

        def tell() -> None:
            tried.append([client.create_flow_run_from_deployment(deployment.id).id for _ in stories])
            for run, states in zip(tried[-1], stories.values(), strict=True):
                client.update_flow_run(run, infrastructure_pid="host:1")  # of its first process
                for state in states:
                    client.set_flow_run_state(run, state, force=True)

        def names(runs: list[UUID]) -> list[str | None]:
            return [client.read_flow_run(run).state_name for run in runs]

        def has_acted() -> list[UUID] | None:
            return next((runs for runs in tried if names(runs) == ["Scheduled", "Crashed", "Cancelled"]), None)

        undone, _, cancelled = wait_for_effect(tell, has_acted, "the automations", each_s=30)
        assert client.read_flow_run(undone).state.message == AUTOMATIC_RETRY
        assert "No worker heard of the cancel" in client.read_flow_run(cancelled).state.message


@pytest.mark.parametrize("automatic", [True, False])
def test_the_source_of_a_retry_is_known_after_a_wait(
    server: str, automatic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Scheduled(message=AUTOMATIC_RETRY) if automatic else Scheduled(name="AwaitingRetry", message="Retry")
    waits = [Scheduled(name="AwaitingConcurrencySlot")] * 2  # what the server makes of a deployment's limit
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(train, parameters={"job": {}}).id
        for state in (Running(), Crashed(), asked, *waits, Pending(), Running()):
            client.set_flow_run_state(run, state, force=True)
    with monkeypatch.context() as patch:  # which ends before what a test leaves behind is looked for
        patch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
        assert is_automatic_retry() == automatic


@pytest.mark.parametrize(
    "since",
    [[Crashed()], [Crashed(), Scheduled(message=AUTOMATIC_RETRY), Crashed()]],
    ids=["once", "twice"],
)
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_cancel_reported_as_a_crash_is_not_undone(
    server: str, cancelled: bool, since: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [Running(), Cancelling(), Crashed(), Scheduled(message="Retry")]  # an earlier cancel counts no more
    story = [*before, Running(), *([Cancelling()] if cancelled else []), *since, Scheduled(message=AUTOMATIC_RETRY)]
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(train, parameters={"job": {}}).id
        for state in (*story, Pending(), Running()):
            client.set_flow_run_state(run, state.model_copy(), force=True)
    with monkeypatch.context() as patch:
        patch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
        if not cancelled:
            assert is_automatic_retry()
            return
        with pytest.raises(RunCancelled, match="Retry resumes it") as raised:
            is_automatic_retry()
    assert failed(raised.value).is_cancelled()


@pytest.mark.parametrize("automatic", [True, False])
def test_the_automation_gives_up_where_attempts_get_nowhere(
    make_job: Make, automatic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["midstride.flows.train"], "is_automatic_retry", lambda: automatic)
    job = make_job(processes=1).model_copy(update={"retries_without_progress": 2})
    run = Run(job, "a")
    attempts = run.attempts
    for _ in range(2):
        attempts.record(attempts.begin(), Outcome("died", "killed"))
        assert attempts_so_far(run) == (0 if automatic else attempts.attempts()[-1].number)
    attempts.record(attempts.begin(), Outcome("died", "killed"))
    if not automatic:
        assert attempts_so_far(run) == 3
        return
    with pytest.raises(WorldError, match=r"3 attempts in a row got no further than the last snapshot\. Retry does"):
        attempts_so_far(run)
