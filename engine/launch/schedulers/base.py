"""What a scheduler is: it starts nodes, says why none will come any more, and ends them."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from midstride.engine.config.nodes import Nodes
from midstride.engine.processes.lifetime import PARENT
from midstride.engine.session.session import Session
from midstride.engine.session.signals import SignalRequests

__all__ = ["NodeRequest", "Scheduler", "join_command", "node_environment"]

#: for a launcher that has gone, before a node that was started for it ends
_WAIT_S = 30
#: what the launcher has said to its own processes; OMP_NUM_THREADS is that of this machine
_OURS = (Session.VARIABLE, PARENT, SignalRequests.VARIABLE, "OMP_NUM_THREADS", "PYTHONHASHSEED")


@dataclass(frozen=True)
class NodeRequest:
    """What machines are asked for.

    Args:
        run: its name; jobs are called after it.
        url: of its folder in the store, which all nodes reach.
        nodes: how many, at least and at most, and how many processes each has.
        arguments: the job's `on_args`.
        grace_s: seconds that a node has to take a snapshot and leave, once it is asked to.
    """

    run: str
    url: str
    nodes: Nodes
    arguments: Mapping[str, Any]
    grace_s: float


class Scheduler(ABC):
    """Who gives a world its machines. An object asks for those of one attempt, once.

    Args:
        request: what is asked for.
    """

    name: ClassVar[str]

    def __init__(self, request: NodeRequest) -> None:
        self.request = request

    @abstractmethod
    def describe(self, address: str) -> str:
        """Return in a line what `start` would ask for, without asking."""

    @abstractmethod
    def start(self, address: str) -> str:
        """Have `join_command(address)` run on each node; return a line on what was asked for.

        Args:
            address: HOST:PORT of the launcher.

        Raises:
            JobError: it was refused, with the scheduler's own words; nothing was started.
            StrategyUnavailable: the scheduler, or what it needs, is not here.
            WorldError: the scheduler does not answer; a retry may help.
        """

    @abstractmethod
    def end_reason(self) -> str:
        """Return why no node will come any more, "" as long as one is running or waiting for its turn.

        It may take its time, and may raise: then it is asked again.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all that was started, that which waits for its turn too. Called once, also when all has ended."""


def join_command(address: str) -> list[str]:
    """Return the command that is a node of the launcher at `address`. It ends by itself once the launcher has gone."""
    return [sys.executable, "-m", "midstride.engine", "join", address, f"--wait={_WAIT_S}"]


def node_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` without what the launcher has said to its own processes."""
    return {name: value for name, value in base.items() if name not in _OURS}
