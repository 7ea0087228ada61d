"""One Prefect server for all processes that run tests side by side: who needs it first starts it."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import IO

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings

from midstride.flows import server

#: database of a server that nobody has used, beside the one of the shared server: to make its tables takes seconds
EMPTY = "prefect-empty.db"


@contextmanager
def shared_server(folder: Path) -> Iterator[str]:
    """Give the address of a server whose database is in `folder`; who has started it waits for those who use it."""
    address = folder / "prefect-address"
    with _locked(folder / "prefect-users", fcntl.LOCK_SH) as users, ExitStack() as ours:
        with _locked(folder / "prefect-start", fcntl.LOCK_EX):
            if not address.exists():
                address.write_text(ours.enter_context(_server(folder)))
                ours.callback(address.unlink)
                ours.callback(fcntl.flock, users, fcntl.LOCK_EX)
        yield address.read_text()
        server._drain()


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    settings = {PREFECT_API_URL: None, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 300}
    with temporary_settings(settings), ExitStack() as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL", "0.5")  # tests wait for events
            for service in ("REPOSSESSOR", "CANCELLATION_CLEANUP"):
                patch.setenv(f"PREFECT_SERVER_SERVICES_{service}_LOOP_SECONDS", "1")
            # A worker receives the events of the last minute again with each run. A Cancel among them that arrives
            # after the process has started would end the retry of the cancelled run.
            patch.setenv("PREFECT_SERVER_EVENTS_MAXIMUM_WEBSOCKET_BACKFILL", "PT1S")
            patch.setenv("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", "support.prefect_app")
            patch.setattr(server, "_APPLICATION", "support.prefect_app:create_app")
            patch.setattr(server, "_login", lambda: "")  # as a server of a person who sets no password
            patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
            patch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{folder}/prefect.db")
            address = running.enter_context(server.api(nullcontext))
        with closing(sqlite3.connect(folder / "prefect.db")) as used, closing(sqlite3.connect(folder / EMPTY)) as empty:
            used.backup(empty)
        yield address


@contextmanager
def _locked(path: Path, how: int) -> Iterator[IO[str]]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield file
