"""Runs torchrun's agent below `midstride join`, for the rounds that the launcher names.

`python -m midstride.engine.launch.machines.agent HOST:PORT FOLDER`
"""

import os
import platform
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.run import main as torchrun

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError, SnapshotError, StopRequested, WorldError
from midstride.engine.launch.elastic_ranks import ranks_forked
from midstride.engine.launch.elastic_rendezvous import Rendezvous
from midstride.engine.launch.launchers.join import Join
from midstride.engine.launch.machines.connections import LauncherConnection
from midstride.engine.launch.machines.join import LAUNCHER_GONE, lock_folder
from midstride.engine.launch.machines.report import NodeReport
from midstride.engine.launch.machines.secret import read_secret
from midstride.engine.processes.environment import cores
from midstride.engine.processes.lifetime import PARENT
from midstride.engine.processes.loopback import interface_towards, interfaces
from midstride.engine.runs.run import Run
from midstride.engine.session.requests import SignalRequests
from midstride.engine.session.session import Session
from midstride.engine.strategies.torch_internals import HashStore
from midstride.engine.world import World

__all__ = []


_GPUS = Path("/proc/driver/nvidia/gpus")


def bits_here() -> dict[str, Any]:
    """Return the facts that decide how this machine computes sums, as JSON; touches no GPU."""
    return {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "gpu": sorted({_model(path) for path in _GPUS.glob("*/information")}),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _model(information: Path) -> str:
    lines = information.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "")


def _unlike(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Return the differences of `here` and `there`, with both values; "" if they are equal."""
    return ", ".join(
        f"{key} {there.get(key)!r} there and {here[key]!r} here" for key in here if there.get(key) != here[key]
    )


def check_bits(first: dict[str, Any], here: dict[str, Any], *, hosts: tuple[str, str], refuses: bool) -> str:
    """Return a sentence on how this node differs from the first one; "" if they are equal.

    Args:
        first: `bits_here` of the first.
        here: `bits_here` of this one.
        hosts: their names.
        refuses: the run is in lanes, which promise the same bits on any nodes, and no others were accepted.

    Raises:
        JobError: they differ, and the run promises the same bits.
    """
    if not (differences := _unlike(first, here)):
        return ""
    words = f"node {hosts[1]} computes sums differently from node {hosts[0]}: {differences}"
    if refuses:
        raise JobError(
            f"{words}. A run in lanes needs equal nodes: let such nodes join, or accept the difference: "
            "--accept-change bits (accept_change: [bits] in the job)"
        )
    return words


_RANK = "midstride.engine.launch.machines.rank"
#: a folder that was written elsewhere may be seen a little later, over NFS
_SEEN_S = 5.0
#: the launcher decides when to stop restarting
_RESTARTS = 1_000_000


class AgentStore(HashStore):
    """A store for the messages that torchrun's agents would exchange.

    At their end they would wait for each other there, and one of them could be lost meanwhile: the launcher knows when
    all have ended.
    """

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once."""


class RoundHandler(Rendezvous):
    """Hands the rounds that the launcher forms to torchrun's agent.

    Args:
        report: speaks with the launcher.
        meeting: where ranks meet: in the launcher's store.
        node: this node's number.
        has_threads: whether a person has said how many threads a rank has; else the launcher says it for all nodes.
    """

    def __init__(self, report: NodeReport, meeting: RendezvousStoreInfo, node: int, *, has_threads: bool) -> None:
        self._report, self._meeting, self._node, self._has_threads = report, meeting, node, has_threads

    @property
    def use_agent_store(self) -> bool:
        """True: ranks meet in the launcher's store of `RendezvousInfo`, so any node can be lost."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round in which this node takes part, waiting for it."""
        plan = self._report.next_round()
        os.environ[World.ROUND] = str(plan.round)
        if not self._has_threads:
            os.environ["OMP_NUM_THREADS"] = str(plan.threads)
        return RendezvousInfo(AgentStore(), plan.nodes.index(self._node), len(plan.nodes), self._meeting)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the agent should end its ranks and request the next round, else 0."""
        return int(self._report.round_ends())

    def get_run_id(self) -> str:
        """Return the node's number."""
        return str(self._node)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SignalException("asked to stop", signal.Signals(number))


def main() -> None:
    """Run a node until the run is over."""
    try:
        _run_node()
    except SignalException:
        sys.exit(StopRequested.exit_code)


def _run_node() -> None:
    address, session = sys.argv[1], Session(sys.argv[2])
    lock_folder(session.folder)
    os.environ[PARENT] = str(os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)  # until torchrun has its own handler, which does the same
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher sends a request to all nodes
    host, _, port = address.rpartition(":")
    try:
        launcher = LauncherConnection(host, int(port), read_secret(None))
        document = launcher.introduce(socket.gethostname(), cores())
    except JobError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
    except (OSError, WorldError) as error:
        print(f"the launcher at {address} has ended or is unreachable: {error}", flush=True)
        sys.exit(LAUNCHER_GONE)
    node = document["node"]
    try:
        run = _run_within_reach(document)
        if differences := _bit_differences(launcher, run.job):
            print(differences, flush=True)
    except JobError as error:
        print(error, flush=True)
        launcher.report({"refused": str(error), "left": "it cannot take part"})
        sys.exit(error.exit_code)
    has_threads = "OMP_NUM_THREADS" in os.environ
    session.begin({**document, "attempt": 0})  # the attempt's own session is the launcher's
    os.environ.update(Join().environment(session, run.job, os.environ))
    os.environ.update(interfaces(os.environ, by=interface_towards(host)))
    os.environ[SignalRequests.VARIABLE] = str(document["grace_s"])
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # then agents need not ask each other for their ranks
    report = NodeReport(launcher, node, session)
    meeting = RendezvousStoreInfo(host, document["store_port"])
    _run_agent(RoundHandler(report, meeting, node, has_threads=has_threads), report, run, session)


def _run_agent(rounds: RoundHandler, report: NodeReport, run: Run, session: Session) -> None:
    machines = run.job.world.machines
    arguments = [
        *(rounds.use(), f"--nnodes={machines.least}:{machines.most}"),
        *(f"--nproc-per-node={machines.processes}", f"--max-restarts={_RESTARTS}", "--monitor-interval=0.1"),
        *("--log-dir", str(session.folder / "agent")),
        *("--module", _RANK, str(session.folder)),
    ]
    try:
        with ranks_forked(_RANK):
            # When the ranks here are done, others may not be: the launcher says what follows, and ends this process.
            while True:
                torchrun(arguments)
    except SignalException:
        if report.all_stop:
            report.next_round()  # the same
        report.leave("asked to stop")
        sys.exit(StopRequested.exit_code)
    except ChildFailedError:
        report.leave("its ranks failed")
        sys.exit(1)


def _bit_differences(launcher: LauncherConnection, job: TrainingJob) -> str:
    """Return differences between this node's sums and those of the first node; "" if none.

    Raises:
        JobError: they differ, and the run promises the same bits on all nodes.
    """
    host, bits = socket.gethostname(), bits_here()
    first = launcher.first_bits({"host": host, "bits": bits})
    refuses = job.world.lanes is not None and "bits" not in job.accept_change
    return check_bits(first["bits"], bits, hosts=(first["host"], host), refuses=refuses)


def _run_within_reach(document: dict[str, Any]) -> Run:
    """Return the run of the launcher's document, if this node sees its code and store.

    Raises:
        JobError: it does not see them.
    """
    run, host = Run.from_document(document), socket.gethostname()
    if not Path(run.job.folder).is_dir():
        raise JobError(
            f"node {host} has no folder {run.job.folder}: the job's code must be at the same path on every node"
        )
    until, found = time.monotonic() + _SEEN_S, ""
    while time.monotonic() < until:
        try:
            found = repr(max((attempt.started for attempt in run.attempts.attempts()), default=None))
        except (OSError, SnapshotError) as error:
            found = str(error)
        if found == document["record"]:
            return run
        time.sleep(0.2)
    raise JobError(
        f"node {host} does not see the launcher's files in {run.url}: use a folder that all nodes share, or s3://"
    )


if __name__ == "__main__":
    main()
