"""A launched world: how it ended, as outcome, log and attempts tell it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.watched_worlds import Interrupted
from laws.horovod_world import needs_horovod
from support.flow_runs import tiny_job

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.launchers import LAUNCHERS
from midstride.engine.errors import JobError, RunHeld, UserCodeError, WorldError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.jobs.operations import run_operation
from midstride.engine.launch import launch as launching
from midstride.engine.launch.launch import launch
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.launch.launchers.build import build_launcher
from midstride.engine.processes.lifetime import descendants
from midstride.engine.processes.process_identity import process_identity
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.events import Event
from midstride.engine.session.session import Session
from midstride.engine.snapshots.holder import held
from midstride.engine.snapshots.lease import acquire
from midstride.engine.storage.store import Store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ties are those of Linux")


WORLD = """
import json, os, signal, sys, time
from midstride.engine.errors import JobError, StopRequested
from midstride.engine.session.events import EventLog
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.session import Session
from midstride.engine.launch.rank import print_whole_lines
print_whole_lines()
session, rank = Session(os.environ["MIDSTRIDE_SESSION"]), int(os.environ.get("RANK", "0"))
document = session.document()
attempt, mode = document["attempt"], document["job"]["module_args"]["mode"]
if mode == "refused":
    session.write_outcome(Outcome.of(JobError("it is another module"), rank=rank))
    sys.exit(2)
if rank == 0:
    events = EventLog(session.events)
    events.emit("resumed", generation=attempt, resumed_from=None, step=0)
    events.emit("step", step=1, epoch=0, loss=0.5)
    events.emit("snapshot", name=f"{20 * attempt:012d}-g{attempt:06d}", step=20)
print("rank", rank, "runs with", os.environ["OMP_NUM_THREADS"], "threads", hash("text"), flush=True)
def end(outcome):
    session.write_outcome(outcome)
    sys.exit(outcome.code)
def stop(*_):
    end(Outcome.of(StopRequested("asked to stop"), rank=rank, step=1))
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else stop)
if mode == "done":
    session.write_outcome(Outcome("done", rank=rank, step=20))
    while len(session.outcomes()) < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(0.01)
    os.abort() if rank == 0 else sys.exit(0)  # torn down badly after the last word
if mode == "kill" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "wrong" and rank == 0:
    end(Outcome.of(JobError("bad job"), rank=rank))
time.sleep(600)
"""


class StandIn(Launcher):
    """A launcher whose ranks are the script above."""

    name = "stand-in"

    def __init__(self, script: str, real: Launcher) -> None:
        self.script, self.real = script, real

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        command = self.real.command(session, job, grace_s=grace_s)
        start = command.index("--module") if "--module" in command else 1
        return [*command[:start], self.script]


@pytest.fixture
def job_of(tmp_path: Path) -> Iterator[Callable[..., TrainingJob]]:
    script = tmp_path / "world.py"
    script.write_text(WORLD)

    def job(mode: str, strategy: str = "single") -> TrainingJob:
        path = tmp_path / "job.yaml"
        world = {"strategy": strategy, "processes": 1 if strategy == "single" else 2}
        document = {"name": "a", "module": "m:M", "data": "m:D", "trainer": {"max_steps": 1}, "world": world}
        path.write_text(json.dumps({**document, "module_args": {"mode": mode}}))
        return TrainingJob.load(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "build_launcher", lambda *which: StandIn(str(script), build_launcher(*which)))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        yield job


def ledger_of(job: TrainingJob) -> AttemptLog:
    return AttemptLog(Store.open(job.run_url("night")))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize(
    ("mode", "kind", "retry"), [("done", "done", False), ("wrong", "user_error", False), ("kill", "died", True)]
)
def test_how_it_ended(job_of: Callable[..., TrainingJob], strategy: str, mode: str, kind: str, retry: bool) -> None:
    job = job_of(mode, strategy)
    lines: list[str] = []
    events: list[Event] = []
    outcome = launch(Run(job, "night"), on_line=lines.append, on_event=events.append, grace_s=5)
    assert outcome.kind == kind
    assert [event.kind for event in events] == ["resumed", "step", "snapshot"]
    assert "rank 0 runs with" in "\n".join(lines)
    # Sets of text have the same order in every rank and every life.
    hashes = set(re.findall(r"runs with \S+ threads (\S+)", "\n".join(lines)))
    python = [sys.executable, "-c", "print(hash('text'))"]
    same = subprocess.run(python, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert hashes == {same.stdout.strip()}
    assert "OMP_NUM_THREADS" not in "\n".join(lines)
    attempt = ledger_of(job).attempts()[0]
    assert (attempt.outcome, attempt.generation, attempt.snapshot) == (kind, 1, "000000000020-g000001")
    assert attempt.first_step_at is not None
    assert ledger_of(job).verdict(job.retries_without_progress).retry is retry
    assert b"rank 0 runs with" in Store.open(job.run_url("night")).read("attempts/000001.log")


@pytest.mark.parametrize("was_trained", [True, False])
def test_a_refused_command_changes_no_record(job_of: Callable[..., TrainingJob], was_trained: bool) -> None:
    run = Run(job_of("done"), "night")
    if was_trained:
        acquire(run.store, None, {})
    assert launch(run).kind == "done"
    before = {path: run.store.read(path) for path in run.store.find()}
    refused = launch(Run(job_of("refused"), "night"))
    assert (refused.kind, refused.error, refused.is_refusal) == ("user_error", "it is another module", was_trained)
    assert ({path: run.store.read(path) for path in run.store.find()} == before) == was_trained
    assert len(run.attempts.attempts()) == (1 if was_trained else 2)


def test_a_held_run_is_launched_only_if_told(job_of: Callable[..., TrainingJob]) -> None:
    run = Run(job_of("done"), "night")
    with held(acquire(run.store, None, process_identity())):
        with pytest.raises(RunHeld):
            launch(run)
        assert run.attempts.attempts() == []
        assert launch(run, take_over=True).kind == "done"


@pytest.mark.parametrize("callback", ["on_event", "on_line"])
def test_an_exception_in_the_pump(job_of: Callable[..., TrainingJob], callback: str) -> None:
    def fail(_: object) -> None:
        raise Interrupted

    job = job_of("waits")
    with pytest.raises(Interrupted):
        launch(Run(job, "night"), grace_s=5, **{callback: fail})
    attempt = ledger_of(job).attempts()[0]
    assert (attempt.outcome, attempt.code) == ("stopped", 75)


def test_a_world_that_stops_too_late_counts_as_stopped(job_of: Callable[..., TrainingJob]) -> None:
    def interrupt(event: Event) -> None:
        if event.kind == "snapshot":
            raise Interrupted

    job = job_of("deaf")
    with pytest.raises(Interrupted):
        launch(Run(job, "night"), on_event=interrupt, grace_s=1)
    attempt = ledger_of(job).attempts()[0]
    assert (attempt.outcome, attempt.code) == ("stopped", 75)
    assert attempt.error.startswith("asked to stop, and ended when the grace of 1 s was over; rank 0 ended")


def test_a_stop_while_the_world_is_being_started(
    job_of: Callable[..., TrainingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "SupervisedProcess", interrupt)
    job = job_of("done")
    with pytest.raises(KeyboardInterrupt):
        launch(Run(job, "night"))
    attempt = ledger_of(job).attempts()[0]
    assert (attempt.outcome, attempt.code, attempt.error) == ("stopped", 75, "asked to stop before a world ran")
    assert not attempt.failed


def test_a_timeout(job_of: Callable[..., TrainingJob]) -> None:
    started: list[Event] = []
    others = descendants(os.getpid())  # what ranks are forked from, if laws are tested too

    def expire(*_: object) -> None:
        raise Interrupted

    def on_event(event: Event) -> None:
        if not started:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        started.append(event)

    before = signal.signal(signal.SIGALRM, expire)
    job = job_of("waits", "ddp")
    try:
        with pytest.raises(Interrupted):
            launch(Run(job, "night"), on_event=on_event, grace_s=5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ledger_of(job).attempts()[0].outcome == "stopped"
    assert set(descendants(os.getpid())) <= set(others)


class FailsAtOnce(Launcher):
    """torchrun with an option that it does not know."""

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        command = build_launcher("torchrun", job.folder).command(session, job, grace_s=grace_s)
        return [*command[:3], "--no-such-option", *command[3:]]


def test_a_launcher_that_starts_no_rank(job_of: Callable[..., TrainingJob]) -> None:
    job = job_of("done", "ddp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "build_launcher", lambda *_: FailsAtOnce())
        outcome = launch(Run(job, "night"))
    assert outcome.kind == "died"
    assert outcome.error.startswith("the launcher ended with 2 before any rank was started")
    assert "unrecognized arguments: --no-such-option" in outcome.error


class KnowsNoHosts(Launcher):
    """A launcher of the user's that raises."""

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        raise LookupError("no hosts")


def test_an_attempt_whose_launcher_raises_says_so(job_of: Callable[..., TrainingJob]) -> None:
    job = job_of("done", "ddp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "build_launcher", lambda *_: KnowsNoHosts())
        with pytest.raises(UserCodeError, match="LookupError: no hosts"):
            launch(Run(job, "night"))
    (attempt,) = ledger_of(job).attempts()
    assert attempt.outcome == "user_error"
    assert "LookupError: no hosts\nraised in launcher KnowsNoHosts" in attempt.error


def test_a_store_that_cannot_be_written(job_of: Callable[..., TrainingJob], tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the store should be")
    with pytest.raises(JobError, match=r"snapshots\.url"):
        launch(Run(job_of("done"), "night"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_horovod if name == "horovodrun" else ()) for name in LAUNCHERS]
)
def test_every_launcher_can_be_built(name: str, tmp_path: Path) -> None:
    assert build_launcher(name, tmp_path).name == name


def test_a_launcher_of_ones_own_is_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "of_my_own.py").write_text("class NotOne: ...")
    with pytest.raises(JobError, match=r"world\.launcher: of_my_own:NotOne .* inherits midstride\.engine\.Launcher"):
        build_launcher("of_my_own:NotOne", tmp_path)
    with pytest.raises(JobError, match=r"world\.launcher: .*of_my_own\.py has no 'Other'"):
        build_launcher("of_my_own:Other", tmp_path)


CRASHED = r"crashed in native code, a segmentation fault \(SIGSEGV\)"


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_a_crash_is_named_and_retried(launcher: str, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, launcher=launcher)
    plan = FaultPlan(tmp_path / "plan").add("crash", rank=1, step=6, phase="backward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(plan.environment.items())))
        outcome = launch(Run(job, "night"))
    plan.assert_all_fired()
    assert (outcome.kind, outcome.rank) == ("died", 1)
    first, way, stack = outcome.error.split("\n", 2)
    assert re.fullmatch(f"rank 1 {CRASHED}", first)
    assert "update or reinstall it" in way
    assert "fault_injection.py" in stack
    assert AttemptLog(Store.open(job.run_url("night"))).verdict(job.retries_without_progress).retry


def test_a_crash_while_data_are_prepared_is_named(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(
        "import ctypes\nfrom midstride.engine import DataModule\n\n\nclass Data(DataModule):\n"
        "    def prepare_data(self) -> None:\n        ctypes.string_at(0)\n"
    )
    job = tiny_job(tmp_path).model_copy(update={"data": "crashing:Data", "data_args": {}})
    with pytest.raises(WorldError, match=rf"{CRASHED}, called by prepare_data, crashing.py:7\n"):
        run_operation("prepare", Run(job, "night"), on_line=print)
