"""A world that hangs is ended with every rank's stack in its log, and goes on from its last snapshot."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job, train_forked
from support.seaweed import Seaweed

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.launch import watchdog
from midstride.engine.launch.launch import launch
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.events import Event
from midstride.engine.storage.store import Store

LIMIT_S = 5.0

#: what a fresh Python imports before its first step takes longer on a busy machine
pytestmark = pytest.mark.usefixtures("forked_worlds")


@pytest.fixture
def time_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], float]], None]:
    """Return a function that gives the watchdog a clock: on a busy machine real seconds pass without a hang."""

    def use(clock: Callable[[], float]) -> None:
        monkeypatch.setattr("midstride.engine.launch.launch.Watchdog", partial(watchdog.Watchdog, clock=clock))

    return use


def hasty(job: TrainingJob) -> TrainingJob:
    limits = {"hang_timeout_s": LIMIT_S, "validation_timeout_s": LIMIT_S}
    return job.model_copy(update={"world": job.world.model_copy(update=limits)})


@pytest.mark.parametrize(
    ("processes", "phase", "option"), [(2, "backward", "hang_timeout_s"), (1, "validation", "validation_timeout_s")]
)
def test_a_hang_is_ended_explained_and_resumed_from(
    time_by: Callable[[Callable[[], float]], None], processes: int, phase: str, option: str, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, processes=processes, launcher="spawn")
    plan = FaultPlan(tmp_path / "plan").add("hang", rank=processes - 1, step=8, phase=phase)
    seconds = itertools.count()
    time_by(lambda: next(seconds) if plan.fired() else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(plan.environment.items())))
        outcome = launch(Run(hasty(job), "night"))
    plan.assert_all_fired()
    assert (outcome.kind, outcome.type) == ("died", "midstride.engine.errors.WorldError")
    assert f"{LIMIT_S:g} s (world.{option})" in outcome.error
    store = Store.open(job.run_url("night"))
    log = store.read("attempts/000001.log").decode()
    for rank in range(processes):
        own = log.partition(f"--- rank {rank}, process")[2].partition("--- rank")[0]
        assert "training_step" in own or "in batch" in own or "in run" in own, f"rank {rank} has no stack"
    assert "fault_injection.py" in log, "the stack shows where it hung"
    assert AttemptLog(store).verdict(job.retries_without_progress).retry

    if processes == 2:
        train_forked(job, "night")
        train_forked(job, "calm")
        assert results(job, "night") == results(job, "calm")


def test_waiting_for_a_store_is_told_and_is_no_hang(
    time_by: Callable[[Callable[[], float]], None], tmp_path: Path, own_s3: Seaweed
) -> None:
    """With both buffers taken training waits, for longer than a hang may last."""
    job = tiny_job(tmp_path, processes=1)
    job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"max_steps": 7})})
    limit_s, events = 2.0, list[Event]()
    time_by(lambda: sum(event.fields["waited_s"] for event in events if event.kind == "waiting"))
    world = job.world.model_copy(update={"hang_timeout_s": limit_s, "validation_timeout_s": limit_s})
    snapshots = SnapshotOptions(url=f"{own_s3.bucket()}/runs", every_steps=1)

    def note(event: Event) -> None:
        events.append(event)
        if event.kind == "snapshot" and event.fields["step"] == 2:
            own_s3.kill()
        is_long = event.kind == "waiting" and event.fields["waited_s"] > 2 * limit_s
        # Not before the next request: one that was under way may have failed in another way.
        is_refused = any("Connect call failed" in one.fields["why"] for one in events if one.kind == "waiting")
        if is_long and is_refused and not back:
            back.append(event.kind)
            own_s3.start()

    back: list[str] = []
    far = job.model_copy(update={"world": world, "snapshots": snapshots})
    assert launch(Run(far, "night"), on_event=note).kind == "done"
    assert back, "the server was away for longer than a hang may last"
    told = [event.fields for event in events if event.kind == "waiting"]
    assert {fields["rank"] for fields in told} == {0}
    assert any("Connect call failed" in fields["why"] for fields in told)
    train_forked(job, "calm")
    store = Store.open(far.run_url("night"))
    assert store.read("metrics.csv") == results(job, "calm")["metrics.csv"]


def test_a_slow_rank_is_named_in_log_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, launcher="spawn", slow_rank=1)
    monkeypatch.setattr(watchdog, "WINDOW_S", 0.1)
    monkeypatch.setattr(watchdog, "_BATCHES", 2)
    lines: list[str] = []
    assert launch(Run(job, "night"), on_line=lines.append).kind == "done"
    told = [line for line in lines if "is slow" in line]
    assert told
    assert all(line.startswith("rank 1 is slow") for line in told)
    assert report_of(Run(job, "night")).slow == (f"attempt 1: {told[0]}",)
