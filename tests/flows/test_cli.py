"""`midstride train` as a person meets it: killed, stopped, without a server."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import httpx
import pytest
from prefect.events.worker import EventsWorker
from support.flow_events import payload, told
from support.flow_runs import STEPS, Command, results, wait_for
from support.ports import free_ports
from support.prefect_server import EMPTY

from midstride.engine.config.job import TrainingJob
from midstride.engine.runs.run import Run
from midstride.engine.runs.summary import summary_of
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.outcome import Outcome
from midstride.engine.storage.store import Store
from midstride.flows import cli as commands
from midstride.flows import server as prefect_server
from midstride.flows.train import train
from midstride.tasks.report import stops_recorded

Make = Callable[..., TrainingJob]
Alive = Callable[[], list[int]]
Start = Callable[..., Command]


@pytest.fixture
def midstride(tmp_path: Path, server: str, alive: Alive) -> Start:
    """Return a function that starts `midstride ...` with the tests' server."""

    def start(*arguments: str, **environment: str) -> Command:
        log = tmp_path / f"output-{time.monotonic_ns()}.txt"
        known = {**os.environ, "PREFECT_API_URL": server, **environment}
        return Command(list(arguments), {name: value for name, value in known.items() if value}, log)

    return start


def _ignores(pid: int, number: signal.Signals) -> bool:
    mask = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def _outcomes(job: TrainingJob, run: str) -> list[str]:
    return [attempt.outcome for attempt in AttemptLog(Store.open(job.run_url(run))).attempts()]


def test_a_killed_flow_resumes_without_a_server_too(
    make_job: Make,
    midstride: Start,
    undisturbed: dict[str, bytes],
    alive: Alive,
    tmp_path: Path,
    shared_folder: Path,
) -> None:
    job, home = make_job(wait_at=8), tmp_path / "home"
    home.mkdir()
    shutil.copy(shared_folder / EMPTY, home / "prefect.db")
    command = ("train", str(tmp_path / "job.yaml"), "--run", "nine-lives")
    first = midstride(*command)
    wait_for((tmp_path / "mark").exists, "the step at which the model waits")
    os.kill(first.process.pid, signal.SIGKILL)
    first.code()
    wait_for(lambda: not alive(), "the world to end after its flow")
    again = midstride(*command, PREFECT_API_URL="", PREFECT_HOME=str(home))
    assert again.code() == 0, again.output
    assert not alive(), "its own server, too, is gone"
    assert results(job, "nine-lives") == undisturbed
    assert _outcomes(job, "nine-lives")[-1] == "done"
    report = Path(job.run_url("nine-lives"), "report.md").read_text()
    assert "the process that launched this world was killed" in report
    assert "| restarts | 1 |" in report
    assert f"{job.run_url('nine-lives')}/curves.png" in again.output
    assert f"{STEPS} in 2 epochs" in again.output
    assert "Error" not in again.output
    assert "prefect" not in again.output.replace("starting Prefect", "").lower()
    assert "prefect" in again.loaded
    assert "torch" not in again.loaded, "a flow orchestrates, and trains nothing"


def test_training_survives_the_end_of_its_own_server(
    make_job: Make, midstride: Start, alive: Alive, tmp_path: Path, shared_folder: Path
) -> None:
    job, home = make_job(wait_at=8, processes=1), tmp_path / "home"
    home.mkdir()
    shutil.copy(shared_folder / EMPTY, home / "prefect.db")
    command = ("train", str(tmp_path / "job.yaml"), "--run", "orphan")
    done = midstride(*command, PREFECT_API_URL="", PREFECT_HOME=str(home))
    wait_for((tmp_path / "mark").exists, "the step at which the model waits")
    [own_server] = [pid for pid in alive() if b"uvicorn" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(own_server, signal.SIGKILL)
    wait_for(lambda: own_server not in alive(), "the server to end")
    (tmp_path / "mark-over").touch()
    assert done.code() == 0, done.output
    assert done.output.count("Prefect's server has ended: the flow ends without it") == 1, done.output
    assert "the run is done, and Prefect's server was not told" in done.output
    assert "Error logging to API" not in done.output
    assert f"{STEPS} in 1 epoch" in done.output
    assert "test: test/accuracy" in Path(job.run_url("orphan"), "report.md").read_text()
    assert train(job, "orphan").outcome == "done"
    assert _outcomes(job, "orphan") == ["done"], "with a server again, nothing is trained anew"


def test_the_end_of_a_flow_waits_for_its_server(
    make_job: Make,
    midstride: Start,
    undisturbed_alone: dict[str, bytes],
    tmp_path: Path,
    shared_folder: Path,
    lasting: set[int],
) -> None:
    job, (port,) = make_job(wait_at=8, processes=1), free_ports(1)
    shutil.copy(shared_folder / EMPTY, tmp_path / "prefect.db")
    with _server(tmp_path, port, lasting) as address:
        flow = midstride("train", str(tmp_path / "job.yaml"), "--run", "patient", PREFECT_API_URL=address)
        wait_for((tmp_path / "mark").exists, "the step at which the model waits")
    (tmp_path / "mark-over").touch()
    wait_for(lambda: "the flow waits for it, up to 10 minutes" in flow.output, "the end of the training")
    with _server(tmp_path, port, lasting):
        assert flow.code() == 0, flow.output
        with httpx.Client(base_url=address) as client:
            [run] = client.post("/flow_runs/filter", json={}).json()
            found = client.post("/artifacts/filter", json={}).json()
    assert run["state_name"] == "Completed"
    assert "patient-report" in {artifact["key"] for artifact in found}
    for words in ("does not record the run for now", "the flow waits for it", "answers again"):
        assert flow.output.count(words) == 1, flow.output
    assert results(job, "patient") == undisturbed_alone


def test_a_second_stop_waits_for_no_server(
    make_job: Make, midstride: Start, alive: Alive, tmp_path: Path, shared_folder: Path, lasting: set[int]
) -> None:
    job = make_job(wait_at=8, processes=1)
    shutil.copy(shared_folder / EMPTY, tmp_path / "prefect.db")
    with _server(tmp_path, free_ports(1)[0], lasting) as address:
        retries = {"PREFECT_CLIENT_RETRY_JITTER_FACTOR": "0", "PREFECT_CLIENT_MAX_RETRIES": "100"}
        flow = midstride("train", str(tmp_path / "job.yaml"), "--run", "left", PREFECT_API_URL=address, **retries)
        wait_for((tmp_path / "mark").exists, "the step at which the model waits")
    os.kill(flow.process.pid, signal.SIGINT)
    wait_for(lambda: "stopping, after a last snapshot" in flow.output, "the first to be heard")
    wait_for(lambda: _outcomes(job, "left") == ["stopped"], "the last snapshot")
    os.kill(flow.process.pid, signal.SIGINT)
    assert flow.code() == 75, flow.output
    assert "SIGINT again: ending at once" in flow.output
    assert "Prefect's server was not told of the stop" in flow.output
    assert not alive()


@contextmanager
def _server(folder: Path, port: int, lasting: set[int]) -> Iterator[str]:
    """Have a server with the database in `folder` that is killed at the end of the block."""
    address = f"http://127.0.0.1:{port}/api"
    with TemporaryFile() as log:
        with pytest.MonkeyPatch.context() as patch, socket.socket() as bound:
            patch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{folder}/prefect.db")
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", port))
            process = prefect_server._start(bound, log, "")
        lasting.add(process.pid)
        try:
            assert prefect_server._ready(process, address, 300.0), prefect_server._tail(log)
            yield address
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_repeated_stop_takes_a_snapshot_and_leaves_nothing(
    make_job: Make,
    midstride: Start,
    undisturbed_alone: dict[str, bytes],
    alive: Alive,
    server: str,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    job, run, hold = make_job(wait_at=8, processes=1), f"stopped-by-{number.name}", tmp_path / "mark-hold"
    hold.touch()
    first = midstride("train", str(tmp_path / "job.yaml"), "--run", run)
    wait_for((tmp_path / "mark").exists, "the step at which the model waits")
    os.killpg(first.process.pid, number)
    if number == signal.SIGTERM:
        wait_for(lambda: _ignores(first.process.pid, number), "the command to stop its world in peace")
        os.killpg(first.process.pid, number)
    hold.unlink()
    assert first.code() == 75, first.output
    assert not alive()
    assert f"--run {run}" in first.output
    [event] = told(server, f"midstride.run.{run}", "midstride.run.stopped")
    said = payload(event).model_dump()
    assert said["job"] == "tiny"
    assert said["steps"] in (8, 9), "the stop comes before or after the step that waits"
    assert "asked to stop" in said["cause"]
    assert train(job, run).outcome == "done"
    assert results(job, run) == undisturbed_alone


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (
            Outcome("died", "rank 1 was killed."),
            "asked to stop before the next attempt; before that: rank 1 was killed.",
        ),
        (Outcome("done"), "asked to stop after its training, before its weights were tested"),
    ],
)
def test_a_stop_after_an_attempt_is_recorded_and_told_of(
    outcome: Outcome, cause: str, make_job: Make, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventsWorker, "drain_all", lambda timeout: None)  # it ends threads that other tests have, too
    run = Run(make_job(processes=1), f"stopped-once-{outcome.kind}")
    run.attempts.record(run.attempts.begin(), outcome)
    with pytest.raises(KeyboardInterrupt), stops_recorded(run):
        raise KeyboardInterrupt
    [event] = told(server, f"midstride.run.{run.name}", "midstride.run.stopped")
    assert payload(event).model_dump()["cause"] == cause
    assert summary_of(run.name, run.store).state == "stopped"


@pytest.mark.parametrize("stage", ["the delay before a retry", "the test of its weights"])
def test_a_flow_stopped_between_tasks_records_it_in_the_run(
    stage: str, make_job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventsWorker, "drain_all", lambda timeout: None)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    job, run = make_job(processes=1), f"stopped-in-{stage.replace(' ', '-')}"
    with monkeypatch.context() as patched:
        if stage == "the test of its weights":
            patched.setattr("midstride.tasks.evaluate.run_operation", interrupt)
        else:
            patched.setattr("midstride.tasks.launch.launch", lambda run, **_: _die(run))
            patched.setattr("midstride.tasks.launch.warn", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(job, run)
    assert summary_of(run, Store.open(job.run_url(run))).state == "stopped"
    assert train(job, run).outcome == "done"


def test_a_stop_before_training_is_told(
    make_job: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("midstride.flows.cli._run_flow", lambda *_: KeyboardInterrupt())
    monkeypatch.setattr("midstride.flows.terminal.quiet_prefect", lambda: None)  # it sets environment variables
    job = make_job(processes=1)
    assert commands.train(Path(job.folder, "job.yaml")) == 75
    assert capsys.readouterr().err == "stopped before training began: the same command starts it\n"


def _die(run: Run) -> Outcome:
    died = Outcome("died", "rank 1 was killed.")
    run.attempts.record(run.attempts.begin(), died)
    return died


def test_an_error_in_user_code_ends_with_2_and_its_traceback(
    make_job: Make, midstride: Start, alive: Alive, tmp_path: Path
) -> None:
    job = make_job(processes=1, fail_at=3)
    command = midstride("train", str(tmp_path / "job.yaml"))
    assert command.code() == 2, command.output
    assert len([*Path(job.store_url).iterdir()]) == 1, "a run without a name is named"
    assert command.output.index("Traceback") < command.output.index("╭")
    assert "the model is not in the mood" in command.output
    assert not alive()


def test_a_faulty_job_ends_with_2_before_anything_starts(make_job: Make, midstride: Start, tmp_path: Path) -> None:
    make_job()
    faults = ("--set", "world.strategy=dpp", "--set", "seed=x")
    command = midstride("train", str(tmp_path / "job.yaml"), *faults, PYTHONPROFILEIMPORTTIME="1")
    assert command.code() == 2
    assert "2 faults" in command.output
    assert "ddp" in command.output
    imported = re.findall(r"^import time:.*\| +(\S+)$", command.output, re.MULTILINE)
    assert "pydantic" in imported
    assert not {"prefect", "torch"} & {*imported}
    assert not (tmp_path / "runs").exists()


def test_what_needs_no_prefect_never_imports_it(make_job: Make, tmp_path: Path) -> None:
    make_job(processes=1)
    script = (
        "import sys; from midstride.flows.cli import app;"
        f"code = app(['fit', {str(tmp_path / 'job.yaml')!r}, '--run', 'plain'], result_action='return_value');"
        "assert code == 0; assert 'prefect' not in sys.modules; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
