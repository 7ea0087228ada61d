"""What stands around a deployed flow: a server and a worker. Either may be killed, and started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from midstride.engine.session.private_file import own_secret
from midstride.flows.server import PASSWORD_FILE

POOL = "desk"


class Service:
    """A process in a session of its own, its output in a file.

    Args:
        command: of `prefect`.
        environment: the whole of it.
        log: gets its output.
        lasting: processes that belong to no single test.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, lasting: set[int]) -> None:
        self.log = log
        self._command, self._environment, self._lasting = [*command], dict(environment), lasting
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Whether it is there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.runs:
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *self._command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Else it inherits from a shell's background job that Ctrl-C is ignored, which a worker ends itself by.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._lasting.add(self._process.pid)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal and wait for its end; what it has started it leaves behind."""
        if self._process is None or not self.runs:
            return
        os.kill(self._process.pid, number)
        self._process.wait(300.0)


def login(home: Path) -> str:
    """Return name and password of the server: those of an embedded one in that home."""
    return f"midstride:{own_secret(home / PASSWORD_FILE)}"


def surroundings(home: Path, port: int) -> dict[str, str]:
    """Return what every process of a site has in its environment."""
    api = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    api["PREFECT_API_AUTH_STRING"] = login(home)
    return {**os.environ, **api, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}  # the fastest there is


def server(home: Path, port: int, lasting: set[int]) -> Service:
    """Return a server with its UI, not yet started."""
    command = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # A worker would receive an earlier Cancel again with the retry of the cancelled run.
    environment = {**surroundings(home, port), "PREFECT_SERVER_EVENTS_MAXIMUM_WEBSOCKET_BACKFILL": "PT1S"}
    environment["PREFECT_SERVER_API_AUTH_STRING"] = login(home)
    return Service(command, environment, home / "server.log", lasting)


def worker(home: Path, port: int, lasting: set[int]) -> Service:
    """Return a process worker, not yet started, that looks twice a second for something to do."""
    environment = {
        **surroundings(home, port),
        "PREFECT_WORKER_QUERY_SECONDS": "0.5",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",
    }
    command = ["worker", "start", "--pool", POOL, "--type", "process", "--name", "hand"]
    return Service(command, environment, home / "worker.log", lasting)
