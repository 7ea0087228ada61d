"""Slurm, by sbatch, squeue and scancel.

An elastic world is an array of jobs of one node each: one that is lost costs no other, and Slurm starts it again. A
world of a fixed size is one job, so that no two runs each hold half of their nodes; Slurm starts all of it again
when a node of it is lost.
"""

import math
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from typing import ClassVar

from midstride.engine.errors import JobError, StrategyUnavailable, WorldError
from midstride.engine.launch.clusters.base import SECRET, Cluster, NodeRequest, join_command, node_environment

__all__ = ["Slurm"]

#: for one of Slurm's commands to answer; they wait as long themselves for a controller that is busy
_ANSWER_S = 60.0
#: beyond the grace: Slurm sends a signal up to a minute early, and looks at its clocks every 30 s
_MARGIN_S = 30.0
#: states of a job that it does not leave; it does that of a node's failure, when it waits for its turn again
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
#: what sbatch says when it is the controller that is at fault
_AWAY = re.compile("unable to contact|timed out|connect|temporarily|not responding", re.IGNORECASE)


class Slurm(Cluster):
    """Submits one-node jobs in an array, or one job of all nodes."""

    name: ClassVar[str] = "slurm"

    def __init__(self, request: NodeRequest) -> None:
        super().__init__(request)
        self._job = ""

    def describe(self, address: str) -> str:
        """Return the command line of sbatch, and the script of the job."""
        return f"{shlex.join(self._sbatch())} --wrap={shlex.quote(self._command(address))}"

    def start(self, address: str, secret: str) -> str:
        """Submit; return which job it is."""
        command = [*self._sbatch(), f"--wrap={self._command(address)}"]
        done = _run(command, secret)
        if done.returncode != 0:
            error = f"sbatch refuses: {_words(done)}\n  it was asked: {shlex.join(command)}"
            raise WorldError(error) if _AWAY.search(done.stderr) else JobError(error)
        self._job = done.stdout.strip().partition(";")[0]  # behind it, the cluster's name
        return f"Slurm's job {self._job} will start the nodes: squeue --job={self._job} shows why it waits"

    def end_reason(self) -> str:
        """Return how the job has ended."""
        done = _run(["squeue", "--noheader", "--states=all", f"--job={self._job}", "--format=%T"])
        if done.returncode != 0 and "Invalid job id" not in done.stderr:  # which is one that Slurm has forgotten
            raise WorldError(_words(done))
        states = {*done.stdout.split()}
        if states - _ENDED:
            return ""
        how = ", ".join(sorted(states)).lower() or "forgotten"
        output = dict(self._named()).get("output", "its output")
        return f"Slurm's job {self._job} has ended ({how}), and no node is left; see the cause in {output}"

    def stop(self) -> None:
        """Cancel the job."""
        if self._job:
            _run(["scancel", self._job])

    def _sbatch(self) -> list[str]:
        nodes = self.request.nodes
        is_array = nodes.least < nodes.most
        size = ["--nodes=1", f"--array=0-{nodes.most - 1}"] if is_array else [f"--nodes={nodes.most}"]
        # Slurm's own time-out and its preemption tell in time for a snapshot; the signal goes to what srun has started.
        notice = f"--signal=TERM@{math.ceil(self.request.grace_s + _MARGIN_S)}"
        return ["sbatch", "--parsable", *size, "--requeue", notice, *_options(self._named())]

    def _named(self) -> dict[str, object]:
        """Return options that a job can override; output goes to the run's folder, if local."""
        named: dict[str, object] = {"job-name": f"midstride-{self.request.run}"}
        folder = self.request.url.removeprefix("file://")
        if "://" not in folder:
            named |= {"output": f"{folder.replace('%', '%%')}/slurm-%j.txt", "open-mode": "append"}
        return named | {name.replace("_", "-"): value for name, value in self.request.arguments.items()}

    def _command(self, address: str) -> str:
        # One task has all processors of its node, and is no process of MPI's.
        srun = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1"]
        return f"exec {shlex.join([*srun, *join_command(address)])}"


def _options(arguments: Mapping[str, object]) -> list[str]:
    """Return options of a command line.

    {"gpus-per-node": 2, "exclusive": True} is --gpus-per-node=2 --exclusive.
    """
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in arguments.items()]


def _environment(secret: str = "") -> dict[str, str]:
    """Return the environment of nodes, without the variables of a job that the launcher is in."""
    environment = {name: text for name, text in node_environment().items() if not _of_a_job(name)}
    if not secret:
        return environment
    # sbatch gives its environment to the job, unless this variable names less.
    given = environment.get("SBATCH_EXPORT", "ALL").split(",")
    if "ALL" not in given:
        environment["SBATCH_EXPORT"] = ",".join([*({*given} - {"NONE", "NIL"}), SECRET])
    return {**environment, SECRET: secret}


def _of_a_job(name: str) -> bool:
    return name.startswith(("SLURM_", "SLURMD_")) and name != "SLURM_CONF"


def _run(command: list[str], secret: str = "") -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's commands, in the environment of nodes.

    Args:
        command: its arguments.
        secret: of the run, for the environment of nodes.

    Raises:
        StrategyUnavailable: there is no such command.
        WorldError: it does not answer.
    """
    try:
        return subprocess.run(
            command, env=_environment(secret), capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except FileNotFoundError:
        raise StrategyUnavailable(
            f"world.on is slurm, but there is no {command[0]} on {os.uname().nodename}: launch on a login node, or "
            "leave on out and start midstride join on each node"
        ) from None
    except subprocess.TimeoutExpired:
        raise WorldError(f"{command[0]} did not answer within {_ANSWER_S:g} s: check that Slurm is running") from None


def _words(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stderr or done.stdout).strip()
