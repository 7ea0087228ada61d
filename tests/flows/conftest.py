"""One real Prefect server for all tests of flows, and a tiny job for them to train."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, get_run_logger
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from support.flow_runs import results, tiny_job, train_forked
from support.prefect_server import shared_server

from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import processes_with_env

_MARK = "MIDSTRIDE_TEST_OF"


@flow
def _warm_up() -> None:
    """Start every thread that Prefect starts once for a process."""
    get_run_logger().info("up")
    emit_event("midstride.test.up", resource={"prefect.resource.id": "midstride.test"})


@pytest.fixture(scope="session", autouse=True)
def server(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of the server, which all workers share; no test starts one of its own by accident."""
    storage = tmp_path_factory.mktemp("results")
    with (
        shared_server(shared_folder) as address,
        temporary_settings({PREFECT_API_URL: address, PREFECT_LOCAL_STORAGE_PATH: storage}),
    ):
        _warm_up()
        yield address


@pytest.fixture(autouse=True)
def _quick(forked_worlds: None) -> None:
    """Fork the worlds and operations of flows that run in this process; `Command` and torchrun start fresh Pythons."""


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Callable[[], list[int]]]:
    """Return a function that gives the living processes this test started, however far down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, str(tmp_path))
        yield lambda: processes_with_env(_MARK, str(tmp_path))
    for pid in processes_with_env(_MARK, str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., TrainingJob]:
    """Return a maker of tiny jobs, of two spawned processes unless told otherwise."""

    def make(processes: int = 2, launcher: str = "", **choices: Any) -> TrainingJob:
        forks = "spawn" if processes > 1 else "inline"
        return tiny_job(tmp_path, processes=processes, launcher=launcher or forks, **choices)

    return make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return what a run leaves that nothing happened to: file -> bytes."""
    job = tiny_job(tmp_path_factory.mktemp("undisturbed"))
    train_forked(job, "reference")
    return results(job, "reference")


@pytest.fixture(scope="session")
def undisturbed_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the same of a run of one process."""
    job = tiny_job(tmp_path_factory.mktemp("alone"), processes=1)
    train_forked(job, "reference")
    return results(job, "reference")
