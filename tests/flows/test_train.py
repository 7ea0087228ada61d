"""The flow keeps its promises: it survives whatever dies, and says what that cost."""

import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
)
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.client.schemas.sorting import ArtifactSort
from support.flow_events import said
from support.flow_runs import STEPS, results, wait_for

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import Superseded, UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.processes.lifetime import parent_of
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.events import Event
from midstride.engine.session.outcome import Outcome
from midstride.engine.storage.store import Store
from midstride.flows.run_states import TAG
from midstride.flows.train import train
from midstride.tasks import monitor as watch
from midstride.tasks.monitor import Validations, view_for
from midstride.tasks.resources import artifact_key

Make = Callable[..., TrainingJob]
Alive = Callable[[], list[int]]


class Onlooker:
    """Remembers what it was shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[Event] = []
        self.urls: list[str] = []

    def begin(self, url: str) -> None:
        self.urls.append(url)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def event(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def onlooker() -> Iterator[Onlooker]:
    with view_for(found := Onlooker()):
        yield found


def _flow_run(run_id: Any) -> tuple[FlowRun, list[TaskRun]]:
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(run_id)
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
        return flow_run, runs


def _artifact(run: str, what: str) -> Any:
    """The newest artifact of that name."""
    key = ArtifactFilterKey(any_=[artifact_key(run, what)])
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=key), sort=ArtifactSort.CREATED_DESC)[0]


def _artifacts_of(run_id: Any) -> list[str]:
    """What each artifact of a flow run is called."""
    here = ArtifactFilterFlowRunId(any_=[run_id])
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=here))
    return sorted(str(one.key).rpartition("-")[2] for one in found)


def test_a_flow_trains_evaluates_and_reports(
    make_job: Make, undisturbed: dict[str, bytes], onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SNAPSHOTS_EVERY_S", 0.0)
    monkeypatch.setattr(watch, "PAGE_EVERY_S", 0.0)
    job = make_job()
    state = train(job, return_state=True)
    report = state.result()
    assert (report.outcome, report.steps, report.epochs, report.failures) == ("done", STEPS, 2, ())
    assert report.run == str(state.state_details.flow_run_id), "the run is named after the flow run"
    assert set(report.test) == {"test/accuracy"}
    assert results(job, report.run) == undisturbed
    for name in ("report", "curves", "best weights", "metric log"):
        assert Path(report.files[name]).exists(), name
    assert [event.kind for event in onlooker.events if event.kind in ("started", "finished")] == ["started", "finished"]
    for task in ("prepare data", "launch world", "evaluate best", "publish report"):
        wait_for(lambda task=task: _states(state, task) == ["Completed"], f"{task} to reach the server")  # type: ignore[misc]
    assert set(wait_for(lambda: _states(state, "snapshot at step"), "recorded snapshots")) == {"Completed"}
    assert f"done, {STEPS} steps; val/accuracy" in _artifact(report.run, "progress").description
    assert state.message == f"max_steps {STEPS} reached"
    page = _artifact(report.run, "report").data
    assert page.count("![curves](data:image/png") == page.count("## Snapshots") == 1
    rows = [line.split("|") for line in page.partition("## Snapshots")[2].splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0][1:-1]] == ["at", "step", "epoch", "size", "stall", "checked", "name"]
    assert [int(row[2]) for row in rows[2:]] == [STEPS, 20, 15, 10, 5]
    for what in ("progress", "report"):
        title = _artifact(report.run, what).description
        assert title, what
        assert report.run not in title, "an id is no title"
    assert _artifacts_of(state.state_details.flow_run_id) == ["progress", "report"], "one page, updated in place"
    worse = Event("validation", 0.0, {"step": STEPS + 1, "epoch": 2, "metrics": {"val/accuracy": -1.0}})
    assert " (best so far: " in Validations.of(Run(job, report.run)).line(worse), "the next attempt knows it"


def test_a_killed_rank_costs_steps_no_bit_and_is_told_of(
    make_job: Make, undisturbed: dict[str, bytes], onlooker: Onlooker, server: str, tmp_path: Path
) -> None:
    (tmp_path / "faults").mkdir()
    plan = FaultPlan(tmp_path / "faults").add("kill", rank=1, step=18, phase="backward")
    job = make_job()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(plan.environment.items())))
        report = train(job, "killed")
    plan.assert_all_fired()
    assert results(job, "killed") == undisturbed
    assert (report.outcome, report.restarts, report.steps) == ("done", 1, STEPS)
    failure = report.failures[0]
    assert failure.cause.startswith("rank 1 ended without a word")
    # Snapshots are written behind training: two may be on their way when it dies.
    assert failure.step == 18
    assert failure.resumed_step in (5, 10, 15)
    assert failure.steps_lost == failure.step - failure.resumed_step
    assert failure.seconds_lost is not None
    assert failure.seconds_lost > 0
    assert any("trying again" in line for line in onlooker.lines)

    committed = wait_for(lambda: _of_steps({5, 20, STEPS}, server, "killed"), "an event for each snapshot")
    assert all(one["bytes"] > 0 for one in committed)
    assert {one["state"].partition(" ")[2] for one in committed} <= {"files, sizes right", ""}, "whole or pruned"
    [resumed] = said(server, "killed", "run.resumed")
    assert (resumed["step"], resumed["run"], resumed["generation"]) == (failure.resumed_step, job.run_url("killed"), 2)
    assert resumed["snapshot"].startswith(f"{resumed['step']:012d}-g")
    [finished] = said(server, "killed", "run.finished")
    assert (finished["job"], finished["steps"], finished["restarts"]) == ("tiny", STEPS, 1)
    assert set(finished["test"]) == {"test/accuracy"}
    assert (finished["ended_by"], finished["why"]) == ("max_steps", f"max_steps {STEPS} reached")


def _of_steps(steps: set[int], server: str, run: str) -> list[dict[str, Any]]:
    """Return what events say about snapshots; none until there is one of each of `steps`."""
    committed = said(server, run, "snapshot.committed")
    return committed if steps <= {one["step"] for one in committed} else []


def test_a_killed_launcher_costs_steps_and_not_a_bit(
    make_job: Make, undisturbed: dict[str, bytes], alive: Alive, tmp_path: Path
) -> None:
    job = make_job(launcher="torchrun", wait_at=8)
    killer = threading.Thread(target=_kill_agent, args=(tmp_path,))
    killer.start()
    report = train(job, "headless")
    killer.join()
    assert results(job, "headless") == undisturbed
    assert (report.outcome, report.restarts) == ("done", 1)
    assert report.failures[0].resumed_step == 5
    assert not alive()


def _kill_agent(folder: Path) -> None:
    wait_for((folder / "mark").exists, "the step at which the model waits")
    wait_for(lambda: [*folder.glob("runs/*/snapshots/000000000005-*/manifest.json")], "the snapshot before it")
    heartbeats = Path(tempfile.gettempdir()).glob("midstride-headless-*/heartbeat-rank-*")
    ranks = [int.from_bytes(path.read_bytes()[:8], sys.byteorder) for path in heartbeats]
    assert len(ranks) == 2
    [agent] = {parent_of(rank) for rank in ranks}
    os.kill(agent, signal.SIGKILL)


def test_an_error_in_user_code_comes_first_and_is_not_retried(make_job: Make, server: str) -> None:
    job = make_job(processes=1, fail_at=7)
    with pytest.raises(UserError) as caught:
        train(job, "moody")
    assert str(caught.value).startswith("Traceback")
    assert "the model is not in the mood" in str(caught.value)
    assert len(AttemptLog(Store.open(job.run_url("moody"))).attempts()) == 1
    text = Path(job.run_url("moody"), "report.md").read_text()
    before_table = text.partition("| --- |")[0]
    assert "Traceback" in before_table
    assert "ValueError: the model is not in the mood" in before_table
    assert "after step 7" in before_table

    [failed] = said(server, "moody", "run.failed")
    assert (failed["job"], failed["outcome"]) == ("tiny", "user_error")
    cause = r"ValueError: the model is not in the mood \(Net.training_step, model.py:\d+\)"
    assert re.fullmatch(cause, failed["cause"])
    with get_client(sync_client=True) as client:
        [run] = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["tiny moody"])))
    assert (run.state_name, run.tags) == ("Failed", [TAG])
    first, _, rest = run.state.message.partition("\n\n")
    assert first == failed["cause"]
    assert rest.startswith("Traceback (most recent call last):")


def test_a_run_that_another_flow_took_over_is_left_to_it(make_job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(processes=1)

    def overtaken(run: Run, **_: object) -> Outcome:
        outcome = Outcome.of(Superseded("generation 2 advances it now"))
        run.attempts.record(run.attempts.begin(), outcome)
        run.attempts.begin()  # that of the other, which is under way
        return outcome

    monkeypatch.setattr("midstride.tasks.launch.launch", overtaken)
    with pytest.raises(Superseded, match="generation 2 advances it now"):
        train(job, "shared")
    assert len(AttemptLog(Store.open(job.run_url("shared"))).attempts()) == 2, "it was not taken back"


def test_data_are_prepared_once_for_a_flow_that_is_retried(make_job: Make) -> None:
    job = make_job(fail_at=0, processes=1)
    state = train.with_options(retries=1)(job, "twice", return_state=True)
    assert isinstance(state.result(raise_on_failure=False), UserError)
    wait_for(lambda: _states(state, "prepare data") == ["Cached", "Completed"], "the states to reach the server")
    assert len(AttemptLog(Store.open(job.run_url("twice"))).attempts()) == 2, "a retry asked for is given a try"


def test_data_that_are_gone_are_prepared_again(make_job: Make, tmp_path: Path) -> None:
    job = make_job(fail_at=0, processes=1, loses_data=True)
    state = train.with_options(retries=1)(job, "careless", return_state=True)
    wait_for(lambda: _states(state, "prepare data") == ["Completed", "Completed"], "the states to reach the server")


def _states(state: Any, name: str) -> list[str]:
    _, runs = _flow_run(state.state_details.flow_run_id)
    return sorted(str(run.state_name) for run in runs if run.name.startswith(name))


def test_a_flow_starts_a_fork(make_job: Make) -> None:
    parent = make_job(processes=1)
    train(parent, "parent")
    longer = parent.model_copy(update={"trainer": parent.trainer.model_copy(update={"max_steps": STEPS + 2})})
    state = train(longer, "child", fork_of="parent", fork_step=20, return_state=True)
    report = state.result()
    assert (report.outcome, report.steps, report.parent) == ("done", STEPS + 2, "parent, step 20")
    assert report.settings == (f"trainer.max_steps={STEPS + 2}",)
    page = _artifact(report.run, "report").data
    assert f"midstride replay {report.url} --step {STEPS + 2}\nmidstride fork {report.url} --run NEW" in page
    again = train(parent, "child", fork_of="parent", fork_step=20)  # the fork keeps its changes
    assert (again.outcome, again.steps) == ("done", STEPS + 2)
    with pytest.raises(UserError, match="exists already"):
        train(parent, "parent", fork_of="child")
