"""An embedded server that does not start is told from one that is slow; what it said is shown."""

import shutil
import stat
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from prefect.blocks.system import Secret
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)
from support.attacker import attack
from support.prefect_server import EMPTY

from midstride.flows import server

#: what is served, seconds given to it, what is said
STARTS = {
    "it cannot be imported": (
        "no_such_module:create_app",
        60,
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


@pytest.mark.parametrize("protected", [False, True], ids=["the control", "with a password"])
def test_another_user_reads_no_secret_of_the_embedded_server(
    protected: bool, shared_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(shared_folder / EMPTY, tmp_path / "prefect.db")
    chosen = {PREFECT_API_URL: None, PREFECT_HOME: tmp_path, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 300}
    with pytest.MonkeyPatch.context() as patch, temporary_settings(chosen), ExitStack() as running:
        patch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
        patch.setattr(server, "_drain", lambda: None)  # it ends threads that other tests have, too
        if not protected:
            patch.setattr(server, "_login", str)
        address = running.enter_context(server.api(lambda text: nullcontext()))
        Secret(value="hunter2").save("theirs")
        told = attack("read_prefect", address)
        assert Secret.load("theirs").get() == "hunter2", "the user's own processes read it"
    assert ("hunter2" in told) == (not protected)
    if protected:
        assert told.startswith("failed: HTTPError: HTTP Error 401")
        password = tmp_path / server.PASSWORD_FILE
        assert stat.S_IMODE(password.stat().st_mode) == 0o600
