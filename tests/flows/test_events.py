"""What a flow tells the server, read back from it; stops are in test_cli.py, champions in test_nightly.py."""

import re
import runpy
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from support.flow_events import payload, told
from support.flow_runs import STEPS, wait_for
from support.seaweed import Seaweed

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import UserError, WorldError
from midstride.engine.fault_injection import FaultPlan
from midstride.flows.run_states import TAG, failed
from midstride.flows.train import train
from midstride.tasks.events import EVENTS, Event

Make = Callable[..., TrainingJob]
DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "events.md"


def said(server: str, run: str, event: str) -> list[dict[str, Any]]:
    """Return what the events about a run say, oldest first."""
    found = told(server, f"midstride.run.{run}", f"midstride.{event}")
    return [payload(one).model_dump() for one in reversed(found)]


def test_a_run_that_is_taken_up_again_tells_its_story(
    make_job: Make, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faults").mkdir()
    plan = FaultPlan(tmp_path / "faults").add("kill", rank=0, step=18, phase="backward")
    job = make_job(processes=1)
    with monkeypatch.context() as patch:
        patch.setenv(*next(iter(plan.environment.items())))
        train(job, "eventful")
    plan.assert_all_fired()
    committed = wait_for(lambda: _of_steps({5, 20, STEPS}, server, "eventful"), "an event for each snapshot")
    [resumed] = said(server, "eventful", "run.resumed")
    # Snapshots are written behind training: two may be on their way when it dies.
    assert resumed["step"] in (5, 10, 15)
    assert resumed["snapshot"].startswith(f"{resumed['step']:012d}-g")
    assert (resumed["run"], resumed["generation"]) == (job.run_url("eventful"), 2)
    assert all(one["bytes"] > 0 for one in committed)
    assert {one["state"].partition(" ")[2] for one in committed} <= {"files, sizes right", ""}, "whole or pruned"
    [finished] = said(server, "eventful", "run.finished")
    assert (finished["job"], finished["steps"], finished["restarts"]) == ("tiny", STEPS, 1)
    assert set(finished["test"]) == {"test/accuracy"}
    assert (finished["ended_by"], finished["why"]) == ("max_steps", f"max_steps {STEPS} reached")


def _of_steps(steps: set[int], server: str, run: str) -> list[dict[str, Any]]:
    """Return what events say about snapshots; none until there is one of each of `steps`."""
    committed = said(server, run, "snapshot.committed")
    return committed if steps <= {one["step"] for one in committed} else []


def test_a_run_that_fails_tells_the_cause(make_job: Make, server: str) -> None:
    with pytest.raises(UserError):
        train(make_job(processes=1, fail_at=2), "mournful")
    [failed] = said(server, "mournful", "run.failed")
    assert (failed["job"], failed["outcome"]) == ("tiny", "user_error")
    cause = r"ValueError: the model is not in the mood \(Net.training_step, model.py:\d+\)"
    assert re.fullmatch(cause, failed["cause"])
    with get_client(sync_client=True) as client:
        [run] = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["tiny mournful"])))
    assert (run.state_name, run.tags) == ("Failed", [TAG])
    first, _, rest = run.state.message.partition("\n\n")
    assert first == failed["cause"]
    assert rest.startswith("Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 1 was killed\nrank 0 then said: no answer", "rank 1 was killed\nrank 0 then said: no answer"),
        ("another run:\n  seed: 7, 8\nto start over: x", "another run:\n  seed: 7, 8\nto start over: x"),
        ("Traceback\nKeyError: 'a'\nraised in f", "KeyError: 'a'\n\nTraceback\nKeyError: 'a'\nraised in f"),
    ],
)
def test_a_failed_state_says_its_cause_first_and_once(text: str, message: str) -> None:
    assert failed(WorldError(text)).message == message


def test_a_store_that_is_waited_for_is_told_of(make_job: Make, server: str, own_s3: Seaweed, tmp_path: Path) -> None:
    job = make_job(processes=1, wait_at=8)
    job = job.model_copy(update={"snapshots": SnapshotOptions(url=f"{own_s3.bucket()}/runs", every_steps=5)})

    def freeze_for_a_while() -> None:
        """Until a rank says that it waits: the flow may be reading a snapshot, and tell of it only afterwards."""
        wait_for((tmp_path / "mark").exists, "the step at which the model waits")
        own_s3.freeze()
        (tmp_path / "mark-over").touch()
        try:
            wait_for(_waits, "the rank to wait for the store")
        finally:
            own_s3.thaw()

    freezer = threading.Thread(target=freeze_for_a_while)
    freezer.start()
    report = train(job, "patient")
    freezer.join()
    awaited = said(server, "patient", "store.awaited")
    assert (report.outcome, report.steps, report.restarts) == ("done", STEPS, 0)
    assert awaited[0]["run"] == job.run_url("patient")
    assert awaited[0]["rank"] == 0
    assert awaited[0]["waited_s"] > 0
    assert awaited[0]["why"]


def _waits() -> bool:
    """Whether a rank of the run has told its launcher that it waits for the store."""
    sessions = Path(tempfile.gettempdir()).glob("midstride-patient-*/events.jsonl")
    return any('"waiting"' in events.read_text() for events in sessions)


@cache
def reference() -> str:
    """Return the reference of the site."""
    return str(runpy.run_path(str(DOCS / "hooks/reference.py"))["events"]())


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.event)
def test_the_page_says_what_each_event_says(kind: type[Event]) -> None:
    [listed] = re.findall(rf"^\| `{kind.event}` \| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", listed) == [name for name in kind.model_fields if name != "run"]
    section = reference().partition(f"## `{kind.event}`\n\n{kind.__doc__}")[2].partition("\n## ")[0]
    for name, field in kind.model_fields.items():
        assert f"| `{name}` | {field.description} |" in section
