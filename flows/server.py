"""Prefect's server: the configured one, or an embedded one for one command."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from midstride.engine.errors import EngineError
from midstride.engine.processes.child_processes import end_within
from midstride.engine.processes.lifetime import die_with_parent
from midstride.engine.processes.loopback import ADDRESS
from midstride.engine.session.private_file import own_secret

__all__ = ["PASSWORD_FILE", "ServerError", "api", "name_faults", "need_server"]

_LAST_LINES = 20
_TRIES = 3  # commands that start at once on a new PREFECT_HOME disturb each other as they make its tables
_LONGER = "give it longer:    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=300"
# As Prefect runs an ephemeral server (prefect.server.api.server), but detached from our signals.
_APPLICATION = "prefect.server.api.server:create_app"
_SERVE = """
import socket, sys, uvicorn
config = uvicorn.Config(sys.argv[1], factory=True, log_level="error", lifespan="on")
uvicorn.Server(config).run([socket.socket(fileno=int(sys.argv[2]))])
"""


#: characters that Prefect's server refuses in names
_NOT_IN_NAMES = "/%&><"
#: in PREFECT_HOME: the password of embedded servers, which only this user can read
PASSWORD_FILE = "midstride-password"


class ServerError(EngineError):
    """Prefect's server is missing, does not answer, or did not start."""


def need_server() -> None:
    """Check that a server is configured and answers.

    Raises:
        ServerError: none is configured, or it does not answer.
    """
    from prefect.settings import get_current_settings

    remedy = "start one with `prefect server start`, and set PREFECT_API_URL=http://HOST:4200/api"
    if get_current_settings().api.url is None:
        raise ServerError(f"no Prefect server is configured, but deployments need one: {remedy}")
    _check_health(remedy)


def name_faults(option: str, name: str) -> list[str]:
    """Return messages about why `name`, given by `option`, cannot be a name on Prefect's server."""
    if name.strip() and not set(name) & set(_NOT_IN_NAMES):
        return []
    return [f"{option} {name!r}: is not a valid name on Prefect's server; use one without {' '.join(_NOT_IN_NAMES)}"]


@contextmanager
def api(busy: Callable[[str], AbstractContextManager[None]]) -> Iterator[str]:
    """Yield an address of Prefect's API: the configured one, else that of an embedded server.

    Prefect can start such a server, but as a child in our process group: Ctrl-C would end it before the flow reports
    its end, and it would survive a SIGKILL of the flow. Ours has its own session and ends with its parent. It has a
    password, because other users of the machine reach its port.

    Args:
        busy: shows a text while something takes long.

    Raises:
        ServerError: the configured one does not answer, or ours does not start.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings, temporary_settings

    settings = get_current_settings()
    if settings.api.url is not None:
        _check_health("start it, or correct PREFECT_API_URL. Without that variable the command starts its own server")
        yield str(settings.api.url)
        return
    login = _login()
    with ExitStack() as server:
        with busy("starting Prefect's embedded server"):
            address = server.enter_context(_embedded(float(settings.server.ephemeral.startup_timeout_seconds), login))
        server.enter_context(temporary_settings({PREFECT_API_URL: address, PREFECT_API_AUTH_STRING: login or None}))
        yield address


def _login() -> str:
    """Return name and password of the embedded server, configured or from PREFECT_HOME.

    Raises:
        ServerError: the password cannot be kept there.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.server.api.auth_string is not None:
        return settings.server.api.auth_string.get_secret_value()
    file = Path(settings.home) / PASSWORD_FILE
    try:
        return f"midstride:{own_secret(file)}"
    except OSError as error:
        why = f"the password of Prefect's embedded server cannot be kept in {file}: {error.strerror}"
        raise ServerError(f"{why}\n  {_home_remedy()}") from error


def _check_health(remedy: str) -> None:
    """Ask the configured server for a sign of life, once."""
    from prefect import get_client
    from prefect.settings import get_current_settings

    from midstride.tasks.without_retries import without_retries

    with without_retries(), get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is not None:
        address, answer = get_current_settings().api.url, str(error).splitlines()[0]
        raise ServerError(f"the Prefect server at {address} does not answer: {answer}\n  {remedy}") from error


@contextmanager
def _embedded(timeout_s: float, login: str) -> Iterator[str]:
    from midstride.tasks.server_outage import server_ended_if

    with tempfile.TemporaryFile() as log:  # without a name: nothing to sweep up after a SIGKILL
        for _ in range(_TRIES):
            log.seek(0)
            log.truncate()
            with socket.socket() as bound:  # a port that is only chosen here could be another server's by then
                bound.bind((ADDRESS, 0))
                address = f"http://{ADDRESS}:{bound.getsockname()[1]}/api"
                process = _start(bound, log, login)
            try:
                if _ready(process, address, timeout_s):
                    try:
                        with server_ended_if(partial(_has_ended, process)):
                            yield address
                    finally:
                        if not _has_ended(process):
                            _drain()
                    return
                if process.poll() is None:
                    raise _start_error(
                        f"Prefect's embedded server did not answer within {timeout_s:.0f} s", log, _LONGER
                    )
            finally:
                _stop(process)
        raise _start_error("Prefect's embedded server ended before it answered", log, _home_remedy())


def _home_remedy() -> str:
    from prefect.settings import get_current_settings

    return f"let it write:      in PREFECT_HOME, now {get_current_settings().home}, or set that to another folder"


def _start_error(what: str, log: IO[bytes], remedy: str) -> ServerError:
    return ServerError(
        f"{what}. Its log ends with:\n{_tail(log)}\n"
        f"  {remedy}\n"
        "  or use a server:   prefect server start, and set PREFECT_API_URL\n"
        "  or do without it:  midstride fit"
    )


def _drain() -> None:
    """Deliver logs and events while the server runs. At exit Prefect would try for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=5)


def _start(bound: socket.socket, log: IO[bytes], login: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", _SERVE, _APPLICATION, str(bound.fileno())]
    environment = os.environ | {
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        **({"PREFECT_SERVER_API_AUTH_STRING": login, "PREFECT_API_AUTH_STRING": login} if login else {}),
        # Its log is shown only if it does not start, and needs only errors.
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[bound.fileno()],
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
    )


def _ready(process: "subprocess.Popen[bytes]", address: str, timeout_s: float) -> bool:
    """Wait for the server's answer. Return False if it ended or never answers."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is not None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    end_within(process, 5)


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
