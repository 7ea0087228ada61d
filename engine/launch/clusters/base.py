"""Cluster: starts nodes, reports why no more will come, and ends them."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from midstride.engine.config.nodes import Nodes
from midstride.engine.launch.machines.secret import VARIABLE as SECRET
from midstride.engine.processes.lifetime import PARENT
from midstride.engine.session.requests import SignalRequests
from midstride.engine.session.session import Session

__all__ = ["SECRET", "Cluster", "NodeRequest", "join_command", "node_environment"]

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
        request: what is asked for.
    """

    name: ClassVar[str]

    def __init__(self, request: NodeRequest) -> None:
        self.request = request

    @abstractmethod
    def describe(self, address: str) -> str:
        """Return in one line what `start` would submit; nothing is submitted."""

    @abstractmethod
    def start(self, address: str, secret: str) -> str:
        """Have `join_command(address)` run on each node; return a line on the request.

        Args:
            address: HOST:PORT of the launcher.
            secret: of the run; nodes get it in the environment variable `SECRET`, and others cannot read it.

        Raises:
            JobError: it was refused, with the cluster's own words; nothing was started.
            StrategyUnavailable: the cluster, or what it needs, is not here.
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
