"""Cluster: starts nodes, reports why no more will come, and ends them."""

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from midstride.engine.config.nodes import Nodes
from midstride.engine.launch.machines.secret import VARIABLE as SECRET
from midstride.engine.processes.lifetime import PARENT
from midstride.engine.session.requests import SignalRequests
from midstride.engine.session.session import Session

__all__ = ["SECRET", "Cluster", "NodeJobs", "NodeRequest", "join_command", "node_environment"]

#: seconds that a node waits for its launcher before it ends by itself
_WAIT_S = 30
#: variables that a launcher sets for its own processes; OMP_NUM_THREADS fits this machine only
_OURS = (Session.VARIABLE, PARENT, SignalRequests.VARIABLE, SECRET, "OMP_NUM_THREADS", "PYTHONHASHSEED")


@dataclass(frozen=True)
class NodeRequest:
    """Request to a cluster to start nodes.

    Args:
        run: name of the run, from which the names of jobs are made.
        url: of the run's folder in the store, which all nodes reach.
        nodes: the smallest and the largest number of nodes, and the processes of each.
        arguments: the job's `on_args`.
        grace_s: seconds that a node has to take a snapshot and leave, once it is asked to.
    """

    run: str
    url: str
    nodes: Nodes
    arguments: Mapping[str, Any]
    grace_s: float


class Cluster(ABC):
    """Starts the nodes of one attempt on a cluster, and ends them.

    Args:
        request: the requested nodes.
    """

    name: ClassVar[str]

    def __init__(self, request: NodeRequest) -> None:
        self.request = request

    @abstractmethod
    def describe(self, address: str) -> str:
        """Return the submission of `start` in one line; nothing is submitted."""

    @abstractmethod
    def start(self, address: str, secret: str) -> str:
        """Have `join_command(address)` run on each node; return a line on the request.

        Args:
            address: HOST:PORT of the launcher.
            secret: of the run; nodes get it in the environment variable `SECRET`, and others cannot read it.

        Raises:
            JobError: it was refused, with the cluster's own words; nothing was started.
            StrategyUnavailable: the cluster, or a package for it, is missing here.
            WorldError: the cluster does not answer; a retry may help.
        """

    @abstractmethod
    def end_reason(self) -> str:
        """Return why no node will join any more; "" while one is running or queued.

        It may be slow and may raise; then it is called again later.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all nodes, queued ones included. Called once, even if all have ended."""


def join_command(address: str) -> list[str]:
    """Return the command that joins the launcher at `address`.

    It ends by itself once the launcher has gone.
    """
    return [sys.executable, "-m", "midstride.engine", "join", address, f"--wait={_WAIT_S}"]


def node_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` without the variables that the launcher sets for its own processes."""
    return {name: value for name, value in base.items() if name not in _OURS}


#: between two questions to the cluster
_EVERY_S = 5.0


class NodeJobs:
    """Starts the nodes at the begin of a `with` block, and ends them with it.

    Args:
        cluster: gives the nodes; None where they come by themselves.
        address: HOST:PORT of the launcher.
        secret: of the run.

    Raises:
        JobError: on entering: it was refused.
        WorldError: on entering: the cluster does not answer.
    """

    def __init__(self, cluster: Cluster | None, address: str, secret: str) -> None:
        self._cluster, self._address, self._secret = cluster, address, secret
        self._end_reason = ""
        self._over = threading.Event()

    def __enter__(self) -> "NodeJobs":
        """Start them."""
        if self._cluster is not None:
            print(self._cluster.start(self._address, self._secret), flush=True)
            # A thread: a cluster that is slow to answer shall not keep the launcher from the nodes that it has.
            watch = threading.Thread(target=self._watch, args=(self._cluster,), name="midstride-nodes", daemon=True)
            watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them."""
        self.stop()

    def end_reason(self) -> str:
        """Return why no node will come any more; "" while some may."""
        return self._end_reason

    def stop(self) -> None:
        """End all of them; again changes nothing."""
        if self._cluster is None or self._over.is_set():
            return
        self._over.set()
        try:
            self._cluster.stop()
        except Exception as error:  # they end by themselves: there is no launcher any more
            print(f"the machines could not be cancelled, and will end by themselves: {error}", flush=True)

    def _watch(self, cluster: Cluster) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                self._end_reason = cluster.end_reason()
            except Exception as error:
                print(f"{cluster.name} does not report the state of the machines: {error}", flush=True)
