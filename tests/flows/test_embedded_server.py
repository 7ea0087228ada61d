"""An embedded server that does not start is told from one that is slow; what it said is shown."""

import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.blocks.system import Secret
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)
from prefect.states import Scheduled
from support.attacker import attack
from support.flow_runs import results
from support.limit import LIMIT_S
from support.prefect_server import EMPTY
from support.prefect_worker import Worker, ended, run_of

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.flows import server
from midstride.flows.deployment import deploy
from midstride.flows.server_setup import create_pool

#: what is served, seconds given to it, what is said
STARTS = {
    "it cannot be imported": (
        "no_such_module:create_app",
        LIMIT_S,
        "ended before it answered(.|\n)*no_such_module(.|\n)*in PREFECT_HOME, now /",
    ),
    "it is slow": (server._APPLICATION, 0, "did not answer within 0 s(.|\n)*give it longer"),
}


@pytest.mark.parametrize("case", STARTS)
def test_a_server_that_does_not_start_says_why(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    application, given_s, words = STARTS[case]
    monkeypatch.setattr(server, "_APPLICATION", application)
    settings = {PREFECT_API_URL: None, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: given_s}
    said = pytest.raises(server.ServerError, match=words)
    with temporary_settings(settings), said, server.api(lambda text: nullcontext()):
        pass


def test_no_other_server_gets_the_port_before_the_embedded_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, taken = server._ready, []

    def with_a_rival(process: Any, address: str, timeout_s: float) -> bool:
        port = int(address.split(":")[2].partition("/")[0])
        with socket.socket() as rival:
            rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            with pytest.raises(OSError, match="in use"):
                rival.bind(("127.0.0.1", port))
        taken.append(port)
        return ready(process, address, timeout_s)

    monkeypatch.setattr(server, "_ready", with_a_rival)
    monkeypatch.setattr(server, "_APPLICATION", "no_such_module:create_app")
    with pytest.raises(server.ServerError), server._embedded(LIMIT_S, ""):
        pass
    assert len(taken) == server._TRIES


@contextmanager
def embedded(shared_folder: Path, home: Path, *, protected: bool = True) -> Iterator[str]:
    """Give the address of an embedded server of its own; without a password it is the control."""
    shutil.copy(shared_folder / EMPTY, home / "prefect.db")
    chosen = {PREFECT_API_URL: None, PREFECT_HOME: home, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 300}
    with pytest.MonkeyPatch.context() as patch, temporary_settings(chosen), ExitStack() as running:
        patch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{home}/prefect.db")
        patch.setattr(server, "_drain", lambda: None)  # it ends threads that other tests have, too
        if not protected:
            patch.setattr(server, "_login", str)
        yield running.enter_context(server.api(lambda text: nullcontext()))


@pytest.mark.parametrize("protected", [False, True], ids=["the control", "with a password"])
def test_another_user_reads_no_secret_of_the_embedded_server(
    protected: bool, shared_folder: Path, tmp_path: Path
) -> None:
    with embedded(shared_folder, tmp_path, protected=protected) as address:
        Secret(value="hunter2").save("theirs")
        told = attack("read_prefect", address)
        assert Secret.load("theirs").get() == "hunter2", "the user's own processes read it"
    assert ("hunter2" in told) == (not protected)
    if protected:
        assert told.startswith("failed: HTTPError: HTTP Error 401")
        password = tmp_path / server.PASSWORD_FILE
        assert stat.S_IMODE(password.stat().st_mode) == 0o600


def test_a_worker_with_the_password_retries_a_run(
    make_job: Callable[..., TrainingJob],
    shared_folder: Path,
    undisturbed_alone: dict[str, bytes],
    tmp_path: Path,
) -> None:
    job = make_job(processes=1, retries_without_progress=0)
    plan = FaultPlan(tmp_path / "plan").add("kill", step=3, phase="backward")
    (tmp_path / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch, embedded(shared_folder, tmp_path) as address:
        create_pool("locked")
        deploy(job, "locked", pool="locked")
        password = PREFECT_API_AUTH_STRING.value()
        assert password
        for name, value in {"PREFECT_API_AUTH_STRING": password, **plan.environment}.items():
            patch.setenv(name, value)
        worker = Worker(tmp_path, address, "locked")
        try:
            run = ended(run_of("train/locked"))
            assert run.state_name == "Failed", (tmp_path / "log.txt").read_text()
            plan.assert_all_fired()
            with get_client(sync_client=True) as client:  # as Retry in the UI does
                client.set_flow_run_state(run.id, Scheduled(name="AwaitingRetry"), force=True)
            assert ended(run).state_name == "Completed", (tmp_path / "log.txt").read_text()
            worker.wait_until_idle()
        finally:
            worker.stop()
    assert results(job, str(run.id)) == undisturbed_alone
    assert password not in (tmp_path / "log.txt").read_text()
