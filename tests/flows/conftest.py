"""One real Prefect server for all tests of flows, and a tiny job for them to train."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, get_run_logger
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from midstride.engine.job import TrainingJob
from midstride.engine.launch import launch
from midstride.engine.launchers.lifeline import marked

TINY = Path(__file__).parent / "tiny"
_MARK = "MIDSTRIDE_TEST_OF"
STEPS = 24  # 96 samples in batches of 4 on two ranks, twice


@flow
def _warm_up() -> None:
    """Start every thread that Prefect starts once for a process."""
    get_run_logger().info("up")
    emit_event("midstride.test.up", resource={"prefect.resource.id": "midstride.test"})


@pytest.fixture(scope="session", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of the server; no test starts one of its own by accident."""
    storage = tmp_path_factory.mktemp("results")
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_LOCAL_STORAGE_PATH: storage}),
    ):
        _warm_up()
        yield str(PREFECT_API_URL.value())


@pytest.fixture
def alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Return a function that gives the living processes this test started, however far down."""
    monkeypatch.setenv(_MARK, str(tmp_path))
    yield lambda: marked(_MARK, str(tmp_path))
    for pid in marked(_MARK, str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., TrainingJob]:
    """Return a maker of tiny jobs, two processes under torchrun unless told otherwise."""
    return lambda **choices: tiny_job(tmp_path, **choices)


def tiny_job(folder: Path, *, processes: int = 2, **module_args: Any) -> TrainingJob:
    """Return the tiny job, its code and its runs in `folder`."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    arguments = {"mark": "./mark", **module_args}
    (folder / "job.yaml").write_text(
        f"""
name: tiny
module: model:Net
module_args: {arguments}
data: model:Data
data_args: {{folder: ./data}}
seed: 3
world: {{strategy: {"ddp" if processes > 1 else "single"}, processes: {processes}}}
trainer: {{max_steps: {STEPS}, enable_progress_bar: false}}
snapshots: {{url: runs, every_steps: 5}}
monitor: {{metric: val/accuracy, mode: max}}
"""
    )
    return TrainingJob.load(folder / "job.yaml")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return what a run leaves that nothing happened to: file -> bytes."""
    job = tiny_job(tmp_path_factory.mktemp("undisturbed"))
    assert launch(job, "reference").kind == "done"
    return results(job, "reference")


def results(job: TrainingJob, run: str) -> dict[str, bytes]:
    """Return the bits that must not depend on what happened to a run."""
    folder = Path(job.run_url(run))
    weights = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.glob("*/weights-*.safetensors")}
    assert weights, f"{folder} holds no weights"
    return {**weights, "metrics.csv": (folder / "metrics.csv").read_bytes()}


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Return what `condition` gives as soon as it is true."""
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.02)
    return found


class Command:
    """`midstride ...` in a process of its own, as a person would run it."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "midstride.flows", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def code(self, timeout_s: float = 120.0) -> int:
        """Wait for its end and return its exit code."""
        return self.process.wait(timeout_s)
