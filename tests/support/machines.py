"""A launcher and the nodes that join it: processes on the loopback, or machines of a network of namespaces."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.flow_runs import results, tiny_job, train_forked, wait_for
from support.limit import LIMIT_S
from support.networks import Network
from support.ports import free_ports

from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import descendants, signal_all

#: nodes that are silent for so long are left out: not too short for a busy machine, on which the others are at work
TIMEOUT_S = 5


class Machine:
    """A node: `midstride join`.

    Args:
        process: that runs it.
        number: in the network, if there is one.
        network: None on the loopback.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", number: int = 0, network: Network | None = None) -> None:
        self.process, self.number, self._network = process, number, network

    def signal(self, by: signal.Signals) -> None:
        """Send a signal to all its processes."""
        signal_all([self.process.pid, *descendants(self.process.pid)], by)

    def kill(self) -> None:
        """End all its processes; its connections are closed."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def power_off(self) -> None:
        """End it without a word to anybody."""
        self.cut()
        self.kill()

    def stop(self) -> None:
        """Ask it to leave."""
        self.find("engine join")[0].terminate()

    def cut(self) -> None:
        """Pull its cable."""
        assert self._network is not None
        self._network.cut(self.number)

    def heal(self) -> None:
        """Put the cable back."""
        assert self._network is not None
        self._network.heal(self.number)

    def find(self, words: str) -> "list[Found]":
        """Return its processes that have `words` in their command."""
        return found_below(self.process.pid, words)

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Wait for its end; return the exit code."""
        return self.process.wait(timeout_s)


class Found:
    """A process of a machine."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            self.command = ""

    def signal(self, by: signal.Signals) -> None:
        """Send it a signal."""
        signal_all([self.pid], by)

    def kill(self) -> None:
        """End it."""
        self.signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.signal(signal.SIGTERM)


def found_below(pid: int, words: str) -> list[Found]:
    """Return the process and its descendants that have `words` in their command."""
    found = [Found(one) for one in (pid, *descendants(pid))]
    return [one for one in found if words in one.command and not one.command.startswith(("sh ", "unshare "))]


class Machines:
    """A launcher and its nodes.

    Args:
        folder: of the job.
        network: the launcher is its last machine; None for the loopback.
        program: the module and the command that the launcher is.
    """

    def __init__(
        self, folder: Path, network: Network | None = None, program: tuple[str, str] = ("midstride.engine", "fit")
    ) -> None:
        self.folder, self.network, self._program = folder, network, program
        self.nodes: list[Machine] = []
        self._chosen: dict[str, Any] = {}
        self._started: list[Machine] = []
        # On the loopback a port that no connection takes while there is no launcher, as the kernel's free ones may be.
        place = f"127.0.0.1:{free_ports(1)[0]}" if network is None else f"{network.address(network.head)}:0"
        self.address, self.secret_file = place, ""
        self.rounds = self.most = self.processes = 0
        self.is_fixed = False  # whether no round may have fewer nodes

    def fit(self, **chosen: Any) -> None:
        """Start the launcher, and return when nodes may come; again, with what was chosen before."""
        self._chosen |= chosen
        world = {"strategy": "ddp", "launcher": "join", "nodes": "1:2", "lanes": 2, "processes": 1}
        world |= {"node_timeout_s": TIMEOUT_S, "grow_after_s": 0, "rendezvous": self.address, **self._chosen}
        least, _, most = str(world["nodes"]).partition(":")
        self.most, self.processes, self.is_fixed = int(most or least), int(world["processes"]), not most
        options = [f"--set=world.{key}={value}" for key, value in world.items() if value is not None]
        head, before = 0 if self.network is None else self.network.head, len(self._asked())
        job = f"{self.folder}/job.yaml"
        self.launcher = self._start(head, "fit.txt", *self._program, job, "--run", "a", *options)
        [(self.address, self.secret_file), *_] = wait_for(lambda: self._asked()[before:], "a rendezvous")

    def _asked(self) -> list[tuple[str, str]]:
        """Return the addresses at which launchers have asked for nodes, and the files with their secrets."""
        return re.findall(r"midstride join (\S+) --secret-file (\S+) on each", self.said("fit.txt"))

    def join(self, number: int = 0, hides: Path | None = None, **environment: str) -> Machine:
        """Start a node.

        Args:
            number: the machine of the network; the next one if it is not said.
            hides: a folder that this node does not see.
            environment: of the node, on top of this process's.
        """
        number, log = number or len(self._started), f"node-{len(self._started)}.txt"
        join = ("midstride.engine", "join", self.address, "--secret-file", self.secret_file, "--wait=120")
        node = self._start(number, log, *join, hides=hides, environment=environment)
        self.nodes.append(node)
        return node

    def wait_for_round(self, ranks: int) -> None:
        """Wait for a round that has so many ranks, after those that were waited for."""

        def found() -> int:
            rounds = re.findall(r"^round \d+: .* (\d+) ranks?\b", self.said("fit.txt"), re.MULTILINE)
            return next(
                (number for number, size in enumerate(rounds, 1) if int(size) == ranks and number > self.rounds), 0
            )

        self.rounds = wait_for(found, f"a round of {ranks} ranks")

    def wait_for_all(self) -> None:
        """Wait for a round of all nodes."""
        self.wait_for_round(self.most * self.processes)

    def wait_for_fewer(self) -> None:
        """Wait until the world does without one: in a round of half of them, or, where it is fixed, in none."""
        if self.is_fixed:
            wait_for(lambda: "have joined" in self.said("fit.txt"), "the launcher to miss a node")
        else:
            self.wait_for_round(self.most // 2 * self.processes)

    def _start(
        self,
        number: int,
        log: str,
        *arguments: str,
        hides: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> Machine:
        command = [sys.executable, "-m", *arguments]
        if hides is not None:
            command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && "$@"', str(hides), *command]
        if self.network is not None:
            command = self.network.command(number, *command)
        with (self.folder / log).open("ab") as out:
            inherited = {**os.environ, **environment}
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=inherited)
        self._started.append(Machine(process, number, self.network))
        return self._started[-1]

    def said(self, log: str = "*.txt") -> str:
        """Return what was printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(log)))

    def close(self) -> None:
        """End what is left."""
        for machine in self._started:
            machine.signal(signal.SIGCONT)
            machine.kill()


def undisturbed(folder: Path, steps: int, **world: Any) -> dict[str, bytes]:
    """Return what the same run leaves that processes of this machine train, one of them in lanes.

    Args:
        folder: of the run.
        steps: it takes.
        world: what was chosen for the nodes; two lanes where nothing is said.
    """
    lanes = world.get("lanes", 2)
    ranks = 1 if lanes else int(world["nodes"]) * world["processes"]
    tiny_job(folder, processes=ranks, steps=steps)
    said = [f"world.strategy={world.get('strategy', 'ddp')}", *([f"world.lanes={lanes}"] if lanes else [])]
    job = TrainingJob.load(folder / "job.yaml", said)
    train_forked(job, "a")
    return results(job, "a")
