"""A real Airflow with a home of its own: scheduler, DAG processor, triggerer and API server, as programs."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support.flow_runs import wait_for
from support.ports import free_ports

__all__ = ["Airflow", "DagRun"]

_SERVICES = ("api-server", "scheduler", "dag-processor", "triggerer")
_ENDS = {"success", "failed", "upstream_failed", "skipped", "removed"}


class Airflow:
    """Airflow with the DAGs in a folder.

    Args:
        program: path of `airflow`.
        home: its folder; DAGs are in `dags` below.
        environment: for all services, and so for tasks.
    """

    def __init__(self, program: str, home: Path, **environment: str) -> None:
        self._program, self._home = program, home
        api, worker_logs, trigger_logs = free_ports(3)
        self._url = f"http://127.0.0.1:{api}"
        options = {
            "core__load_examples": "False",
            "core__dags_folder": f"{home}/dags",
            "core__parallelism": "2",
            "core__simple_auth_manager_all_admins": "True",
            "core__execution_api_server_url": f"{self._url}/execution/",
            "api__port": str(api),
            "api__host": "127.0.0.1",
            "api__workers": "1",
            "api__secret_key": "of the tests",
            "api_auth__jwt_secret": "of the tests, and long enough for HMAC",
            "dag_processor__refresh_interval": "1",
            "workers__min_heartbeat_interval": "1",
            "logging__worker_log_server_port": str(worker_logs),
            "logging__trigger_log_server_port": str(trigger_logs),
        }
        self._environment = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            **{f"AIRFLOW__{name.upper()}": value for name, value in options.items()},
            **environment,
        }
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._client = httpx.Client(timeout=100)

    def __call__(self, *arguments: str) -> str:
        """Run a command of Airflow; return its output."""
        done = subprocess.run(
            [self._program, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self) -> Iterator["Airflow"]:
        """Run the services in the block."""
        self("db", "migrate")
        try:
            for name in _SERVICES:
                self.start(name)
            token = wait_for(self._token, "Airflow's API to answer")
            self._client.headers["Authorization"] = f"Bearer {token}"
            yield self
        finally:
            self._client.close()
            for name in [*self._services]:
                self.stop(name, signal.SIGTERM)

    def start(self, name: str) -> None:
        """Start a service."""
        with (self._home / f"{name}.log").open("ab") as log:
            self._services[name] = subprocess.Popen(
                [self._program, name], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, name: str, number: signal.Signals) -> None:
        """End a service by a signal."""
        service = self._services.pop(name)
        service.send_signal(number)
        try:
            service.wait(30)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """Call the API and return its answer."""
        answer = self._client.request(method, f"{self._url}/api/v2/{path}", json=body or None)
        assert answer.is_success, (path, answer.text)
        return answer.json()

    def run(self, dag: str, date: str) -> "DagRun":
        """Start a DAG for a date, once Airflow knows it."""

        def known() -> bool:
            return dag in [one["dag_id"] for one in self.ask("GET", "dags?exclude_stale=true")["dags"]]

        wait_for(known, f"the DAG {dag}; {self.ask('GET', 'importErrors')}")
        self.ask("PATCH", f"dags/{dag}", is_paused=False)
        self.ask("POST", f"dags/{dag}/dagRuns", dag_run_id=date, logical_date=f"{date}T00:00:00Z")
        return DagRun(self, dag, date)

    def _token(self) -> str:
        try:
            return str(self._client.get(f"{self._url}/auth/token").raise_for_status().json()["access_token"])
        except httpx.HTTPError:
            for name, service in self._services.items():
                assert service.poll() is None, (self._home / f"{name}.log").read_text()
            return ""


class DagRun:
    """A run of a DAG."""

    def __init__(self, airflow: Airflow, dag: str, name: str) -> None:
        self._airflow, self._dag = airflow, dag
        self._name, self._url = name, f"dags/{dag}/dagRuns/{name}"

    def ended(self) -> dict[str, str]:
        """Wait for its end; return the state of each task."""
        wait_for(lambda: self._airflow.ask("GET", self._url)["state"] in _ENDS, f"the end of {self._dag}")
        return {name: str(task["state"]) for name, task in self.tasks().items()}

    def tasks(self) -> dict[str, Any]:
        """Return its tasks by name."""
        found = self._airflow.ask("GET", f"{self._url}/taskInstances")["task_instances"]
        return {task["task_id"]: task for task in found}

    def until(self, task: str, state: str) -> None:
        """Wait until a task has a state."""
        wait_for(lambda: self.tasks()[task]["state"] == state, f"{task} to be {state}; it is {self.tasks()[task]}")

    def fail(self, task: str) -> None:
        """Stop a task as the UI does: mark it failed."""
        self._airflow.ask("PATCH", f"{self._url}/taskInstances/{task}", new_state="failed")

    def clear(self, task: str) -> None:
        """Have a task and those after it run again."""
        self._airflow.ask(
            "POST",
            f"dags/{self._dag}/clearTaskInstances",
            dry_run=False,
            dag_run_id=self._name,
            task_ids=[task],
            include_downstream=True,
            only_failed=False,
        )

    def result(self, task: str) -> Any:
        """Return the XCom of a task."""
        return self._airflow.ask("GET", f"{self._url}/taskInstances/{task}/xcomEntries/return_value")["value"]
