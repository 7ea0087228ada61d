"""Kill, cut, freeze, stop and add the nodes of runs in lanes at random, and compare what they come to.

make soak-nodes
make soak-nodes ARGS="--minutes 60 --seed 3"
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGUSR1

from support.flow_runs import results, tiny_job, train_forked
from support.machines import Machine, Machines
from support.networks import Network, why_no_network

from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import signal_all
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of

STEPS, LANES, MOST = 240, 4, 3
#: exit codes after which the launcher is started again: a retry may help, stopped, killed
_AGAIN = (1, 75, 137)


class Fate:
    """What happens to the machines of one run.

    Args:
        machines: a launcher that has been started, and its nodes.
        draw: where and when.
    """

    def __init__(self, machines: Machines, draw: random.Random) -> None:
        self._machines, self._draw, self._launched = machines, draw, 0
        self.log: list[str] = []
        self._acts: list[Callable[[], object]] = [
            self.kill,
            self.kill_rank,
            self.freeze,
            self.stop,
            self.join,
            self.join,
        ]
        self._acts += [self.join, self.kill_launcher, self.stop_launcher, self.snapshot]
        if machines.network is not None:
            self._acts += [self.power_off, self.cut, self.cut_head]

    def live(self) -> None:
        """Let things happen until the run is done."""
        self.launch()
        self.join()
        while (code := self._launcher.process.poll()) != 0:
            if code is not None:
                assert code in _AGAIN, f"the launcher ended with {code}"
                self.launch()
            self._machines.nodes[:] = [node for node in self._machines.nodes if node.process.poll() is None]
            if not self._machines.nodes:
                self.join()
            self._draw.choice(self._acts)()
            time.sleep(self._draw.uniform(0, 8) ** 2 / 6)
        for node in self._machines.nodes:
            node.wait()

    def launch(self) -> None:
        """Start the launcher, as an orchestrator's retry does."""
        self._note("launcher")
        self._machines.fit(nodes=f"1:{MOST}", lanes=LANES, node_timeout_s=3)
        self._launched += 1
        self._launcher = self._machines.launcher

    def join(self) -> None:
        """Start a node where there is a machine free."""
        busy = {node.number for node in self._machines.nodes if node.process.poll() is None}
        if free := sorted({*range(1, MOST + 2)} - busy):
            self._note("join", number := self._draw.choice(free))
            self._machines.join(number)

    def kill(self) -> None:
        """Kill a node."""
        self._on_node(Machine.kill)

    def power_off(self) -> None:
        """Kill a node that cannot say so."""
        node = self._on_node(Machine.power_off)
        node.heal()

    def cut(self) -> None:
        """Pull a node's cable for a while."""
        node = self._on_node(Machine.cut)
        time.sleep(self._draw.uniform(0, 10))
        node.heal()

    def cut_head(self) -> None:
        """Pull the launcher's cable for a while."""
        self._note("cut the head")
        self._launcher.cut()
        time.sleep(self._draw.uniform(0, 6))
        self._launcher.heal()

    def freeze(self) -> None:
        """Freeze a node for a while."""
        node = self._on_node(lambda node: node.signal(SIGSTOP), "freeze")
        time.sleep(self._draw.uniform(0, 6))
        node.signal(SIGCONT)

    def stop(self) -> None:
        """Ask a node to leave."""
        with contextlib.suppress(IndexError):
            self._on_node(Machine.stop)

    def kill_rank(self) -> None:
        """Kill a rank, if there is one."""
        with contextlib.suppress(IndexError):
            self._on_node(lambda node: node.find("machines.rank")[0].kill(), "kill_rank")

    def kill_launcher(self) -> None:
        """Kill the launcher."""
        self._on_launcher("kill")

    def stop_launcher(self) -> None:
        """Ask the launcher to stop."""
        self._on_launcher("terminate")

    def snapshot(self) -> None:
        """Ask for a snapshot."""
        self._note("snapshot")
        for one in self._launcher.find("engine fit")[:1]:
            signal_all([one.pid], SIGUSR1)

    def _on_launcher(self, act: str) -> None:
        if self._draw.random() < 0.5:  # not too often: it ends the whole attempt
            self._note(f"{act} launcher")
            for one in self._launcher.find("engine fit")[:1]:
                getattr(one, act)()
            self._launcher.wait(120)

    def _on_node(self, act: Callable[[Machine], object], name: str = "") -> Machine:
        node = self._draw.choice(self._machines.nodes)
        self._note(name or act.__name__, node.number)
        act(node)
        return node

    def _note(self, what: str, number: int = 0) -> None:
        self.log.append(f"{what} {number or ''}".strip())


def soak(seed: int, folder: Path, expected: dict[str, bytes], network: Network | None) -> None:
    """Let one run live through what `seed` says; it must end with what is expected."""
    job = tiny_job(folder, steps=STEPS, slow_rank=0)
    machines, began = Machines(folder, network), time.monotonic()
    fate = Fate(machines, random.Random(seed))
    try:
        fate.live()
    except BaseException:
        print(f"seed {seed}: {', '.join(fate.log)}; the logs are in {folder}", flush=True)
        raise
    finally:
        machines.close()
    assert results(job, "a") == expected, f"seed {seed}: not the same bits: {', '.join(fate.log)}"
    assert audit(job.run_url("a")).is_clean
    attempts, rounds = len(Run(job, "a").attempts.attempts()), len(report_of(Run(job, "a")).rounds)
    took = f"{time.monotonic() - began:.0f} s, {attempts} attempts, {rounds} rounds"
    print(f"seed {seed}: the bits of a run undisturbed; {took}: {', '.join(fate.log)}", flush=True)


def main() -> None:
    """Soak until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loopback", action="store_true", help="without network namespaces")
    arguments = parser.parse_args()
    why = "as was asked for" if arguments.loopback else why_no_network()
    if why:
        print(f"nodes are processes on the loopback: no cable is cut: {why}", flush=True)
    until, seed = time.monotonic() + 60 * arguments.minutes, arguments.seed
    parent = Path(tempfile.mkdtemp(prefix="soak-nodes-"))
    (parent / "calm").mkdir()
    tiny_job(parent / "calm", processes=1, steps=STEPS)
    calm = TrainingJob.load(parent / "calm" / "job.yaml", ["world.strategy=ddp", f"world.lanes={LANES}"])
    train_forked(calm, "a")
    expected = results(calm, "a")
    with contextlib.nullcontext() if why else Network(MOST + 2) as network:
        while time.monotonic() < until:
            folder = parent / str(seed)
            folder.mkdir()
            soak(seed, folder, expected, network)
            seed += 1
    print(f"{seed - arguments.seed} runs, seeds {arguments.seed} to {seed - 1}: not a bit is other than undisturbed")


if __name__ == "__main__":
    sys.exit(main())
