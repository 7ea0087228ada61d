"""Ray: a task a node, which runs `midstride join` there.

A task whose machine is lost costs no other, and Ray runs it again where there is room. Ray's autoscaler sees tasks that
wait, and gives machines.
"""

import os
import signal
import subprocess
import sys
from typing import Any, ClassVar

from midstride.engine.errors import StrategyUnavailable, WorldError
from midstride.engine.launch.clusters.base import SECRET, Cluster, NodeRequest, join_command
from midstride.engine.processes.signal_handlers import signal_handlers

__all__ = ["Ray"]


def _run_node(command: list[str], secret: str, grace_s: float) -> int:
    """Run a node in a killable process of Ray; return the exit code of `midstride join`."""
    supervisor = [sys.executable, "-m", "midstride.engine.processes.supervisor", str(os.getpid()), str(grace_s)]
    return subprocess.run([*supervisor, *command], env={**os.environ, SECRET: secret}, check=False).returncode


class Ray(Cluster):
    """Submits a task for each node."""

    name: ClassVar[str] = "ray"

    def __init__(self, request: NodeRequest) -> None:
        super().__init__(request)
        self._address = str(request.arguments.get("address", "auto"))
        self._tasks: list[Any] = []

    def describe(self, address: str) -> str:
        """Return the number of tasks, the resources of each, and its command."""
        needs = ", ".join(f"{amount:g} {name}" for name, amount in self._resources().items())
        command, most = " ".join(join_command(address)), self.request.nodes.most
        return f"{most} tasks on Ray at {self._address}, each with {needs}: {command}"

    def start(self, address: str, secret: str) -> str:
        """Submit the tasks."""
        try:
            import ray
        except ImportError:
            raise StrategyUnavailable(
                "world.on is ray, which is not installed here: pip install 'midstride[ray]', in the cluster's version"
            ) from None
        ours: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with signal_handlers(ours):  # after it, they are back: Ray's own would end the launcher
                ray.init(address=self._address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, OSError, RuntimeError) as error:
            raise WorldError(f"Ray does not answer at {self._address}: {error}") from error
        task = ray.remote(_run_node).options(name=f"midstride-{self.request.run}", **self._options())
        # As an argument: Ray's dashboard and logs show the variables of a `runtime_env`.
        given = (join_command(address), secret, self.request.grace_s)
        self._tasks = [task.remote(*given) for _ in range(self.request.nodes.most)]
        return f"Ray's tasks midstride-{self.request.run} will start the nodes: ray list tasks shows why they wait"

    def end_reason(self) -> str:
        """Return how the tasks have ended."""
        import ray

        ended, others = ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)
        if others:
            return ""
        return f"Ray's tasks have ended ({', '.join(sorted({_end_of(task) for task in ended}))}), and no node is left"

    def stop(self) -> None:
        """Cancel the tasks; their processes end with them."""
        import ray

        for task in self._tasks:
            ray.cancel(task, force=True)
        ray.shutdown()

    def _resources(self) -> dict[str, float]:
        return {"CPU": self.request.nodes.processes, **self.request.arguments.get("resources", {})}

    def _options(self) -> dict[str, Any]:
        resources = self._resources()
        # Ray knows these two apart from all others. A task that is lost is run again, however often.
        counts = {"num_cpus": resources.pop("CPU"), "num_gpus": resources.pop("GPU", 0)}
        return {**counts, "resources": resources, "max_retries": -1, "scheduling_strategy": "SPREAD"}


def _end_of(task: Any) -> str:
    import ray

    try:
        return f"exit code {ray.get(task)}"
    except ray.exceptions.RayError as error:
        return type(error).__name__
