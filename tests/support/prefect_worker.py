"""A process worker of Prefect, and runs of deployments."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from support.flow_runs import wait_for
from support.limit import LIMIT_S

from midstride.engine.processes.lifetime import descendants

__all__ = ["Worker", "ended", "run_of"]


class Worker:
    """A process worker as an operator starts it; it knows no folder of ours.

    Args:
        folder: where it keeps its home and its log.
        server: address of the API.
        pool: name of its work pool.
    """

    def __init__(self, folder: Path, server: str, pool: str) -> None:
        self.pool, self.log = pool, folder / "log.txt"
        environment = {
            **os.environ,
            "PREFECT_API_URL": server,
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait_until_idle(self) -> None:
        """Wait for its runs to end: a flow's process outlives its last state a little."""
        wait_for(lambda: not descendants(self.process.pid), "the worker's runs to end")

    def stop(self) -> None:
        """Stop it, and kill it with its runs if that takes long."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run_of(deployment: str, **parameters: Any) -> FlowRun:
    """Ask for a run, as the UI does."""
    with get_client(sync_client=True) as client:
        there = client.read_deployment_by_name(deployment)
        return client.create_flow_run_from_deployment(there.id, parameters=parameters)


def ended(run: FlowRun, timeout_s: float = LIMIT_S) -> FlowRun:
    """Wait for its end."""
    with get_client(sync_client=True) as client:

        def final() -> FlowRun | None:
            now = client.read_flow_run(run.id)
            return now if now.state is not None and now.state.is_final() else None

        return wait_for(final, f"the end of {run.name}", timeout_s)  # type: ignore[no-any-return]
