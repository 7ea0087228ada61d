"""A site: one server, one worker and the flow deployed to it, as an operator has them before them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.flow_runs import wait_for
from support.ports import free_ports
from ui.browser import Screen, browser
from ui.services import POOL, login, server, surroundings, worker

from midstride.engine.config.job import TrainingJob
from midstride.tasks.resources import artifact_key

#: states in which nothing more happens by itself
TERMINAL = {"Completed", "Failed", "Crashed", "Cancelled"}
_STATE_WITHIN_S = 900.0


class Api:
    """The server's API, asked again while it is busy or away.

    Args:
        address: of the server.
        login: name and password.
    """

    def __init__(self, address: str, login: str) -> None:
        name, _, password = login.partition(":")
        self._client = httpx.Client(base_url=f"{address}/api", timeout=30.0, auth=(name, password))

    def get(self, path: str) -> Any:
        """Return what is at `path`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to `body`."""
        return self._ask("POST", path, body)

    def answers(self, path: str) -> bool:
        """Whether there is something at `path`, now."""
        try:
            return self._client.get(path).is_success
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Leave."""
        self._client.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        answer = wait_for(lambda: self._answer(method, path, body), f"{method} {path}")
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response | None:
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError:
            return None
        return None if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else answer  # SQLite was busy


@dataclass(frozen=True)
class Run:
    """A flow run, by what the API tells of it."""

    api: Api
    id: str
    job: TrainingJob

    @property
    def state(self) -> str:
        """The name of its state."""
        return str(self.api.get(f"/flow_runs/{self.id}")["state"]["name"])

    def reaches(self, *states: str) -> str:
        """Wait until it is in one of `states`, and return which."""
        end = TERMINAL | {*states}
        state = wait_for(lambda: found if (found := self.state) in end else "", f"run {self.id}", _STATE_WITHIN_S)
        assert state in states, f"it is {state}: {self.told()}"
        return str(state)

    def tasks(self, name: str) -> list[str]:
        """The states of its task runs whose names start with `name`, oldest first."""
        body = {"flow_runs": {"id": {"any_": [self.id]}}, "sort": "EXPECTED_START_TIME_ASC"}
        runs = self.api.post("/task_runs/filter", body)
        return [str(run["state_name"]) for run in runs if run["name"].startswith(name)]

    def processes(self, program: bytes = b"") -> list[int]:
        """What lives for it, however far down, and runs `program` (if it is said) and not merely looks after it."""
        mark, found = f"PREFECT__FLOW_RUN_ID={self.id}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                command = (folder / "cmdline").read_bytes()
                if mark in (folder / "environ").read_bytes() and program in command:
                    found.append((int(folder.name), command))
        return [pid for pid, command in found if not program or b".supervisor" not in command]

    def artifact(self, what: str) -> dict[str, str]:
        """The newest artifact called `what`: its id, description and data."""
        body = {"artifacts": {"key": {"any_": [artifact_key(self.id, what)]}}, "sort": "CREATED_DESC"}
        return dict(self.api.post("/artifacts/filter", body)[0])

    def logs(self) -> str:
        """The last two hundred records of its log."""
        body = {"logs": {"flow_run_id": {"any_": [self.id]}}, "sort": "TIMESTAMP_DESC"}
        return "\n".join(line["message"] for line in reversed(self.api.post("/logs/filter", body)))

    def told(self) -> str:
        """The end of its log."""
        return self.logs()[-3000:]

    def set_crashed(self) -> None:
        """Say that it has crashed, as a person may in the UI."""
        state = {"type": "CRASHED", "name": "Crashed", "message": "its worker was stopped"}
        self.api.post(f"/flow_runs/{self.id}/set_state", {"state": state, "force": True})


class Site:
    """The server, the worker, and what they are asked.

    Args:
        home: of Prefect: its database, its results.
        pictures: folder for what the browser shows.
        lasting: processes that belong to no single test.
    """

    def __init__(self, home: Path, pictures: Path, lasting: set[int]) -> None:
        (port,) = free_ports(1)
        self.home, self.pictures, self.address = home, pictures, f"http://127.0.0.1:{port}"
        self.server, self.worker = server(home, port, lasting), worker(home, port, lasting)
        self.login = login(home)
        self.api = Api(self.address, self.login)
        self._environment = surroundings(home, port)
        self.deployment = ""
        self._runs: list[Run] = []

    @contextmanager
    def open(self, job: Path) -> Iterator["Site"]:
        """Have it all running, and `job` deployed to it, until the block ends."""
        try:
            self._start_server()
            self.command("prefect", "work-pool", "create", POOL, "--type", "process")
            self.command("midstride.flows", "deploy", str(job), "--name", "tests", "--pool", POOL)
            self.deployment = str(self.api.get("/deployments/name/train/tests")["id"])
            self.start()
            yield self
        finally:
            self.api.close()
            self.worker.end()
            self.server.end()

    def start(self) -> None:
        """Start what does not run."""
        self._start_server()
        self.worker.start()

    def command(self, *words: str) -> None:
        """Run `python -m ...`, as an operator does in a shell."""
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, env=self._environment, cwd=self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"

    def strange_browser(self) -> AbstractContextManager[Screen]:
        """Have a browser open that is not logged in."""
        return browser(self.address, self.pictures)

    @contextmanager
    def browser(self) -> Iterator[Screen]:
        """Have a browser open that is logged in."""
        with self.strange_browser() as screen:
            screen.log_in(self.login)
            screen.sees("Dashboard")
            yield screen

    def run(self, job: TrainingJob, **environment: str) -> Run:
        """Have the worker run `job`, with this added to its environment."""
        body = {"parameters": {"job": job.model_dump(mode="json")}, "job_variables": {"env": environment}}
        created = self.api.post(f"/deployments/{self.deployment}/create_flow_run", body)
        run = Run(self.api, str(created["id"]), job)
        self._runs.append(run)
        return run

    def end_runs(self) -> None:
        """Kill whatever lives for a run."""
        for pid in [pid for run in self._runs for pid in run.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._runs.clear()

    def _start_server(self) -> None:
        self.server.start()

        def answers() -> bool:
            assert self.server.runs, f"{self.server.log} ends:\n{self.server.log.read_text()[-3000:]}"
            return self.api.answers("/health")

        wait_for(answers, "the server")
