"""`midstride join`: machines that go and come change no bit of a run in lanes; nodes are processes on the loopback."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job, train_forked, wait_for

from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import descendants, signal_all
from midstride.engine.runs.audit import audit
from midstride.engine.runs.report import report_of
from midstride.engine.runs.run import Run

#: nodes that are silent for so long are left out: not too short for a busy machine, on which the others are at work
TIMEOUT_S = 5
#: enough to be in the middle of, at two seconds a step, until other nodes have come
STEPS = 64


class Machines:
    """A launcher and its nodes.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._address = "127.0.0.1:0"
        self.rounds = 0

    def fit(self, nodes: str = "1:2", lanes: int | None = 2) -> None:
        """Start the launcher, and return when nodes may come."""
        chosen = {
            "strategy": "ddp",
            "launcher": "join",
            "nodes": nodes,
            "node_timeout_s": TIMEOUT_S,
            "grow_after_s": 0,
            "processes": 1,
        }
        chosen |= {"rendezvous": self._address} | ({} if lanes is None else {"lanes": lanes})
        options = [f"--set=world.{key}={value}" for key, value in chosen.items()]
        self.launcher = self._start("fit.txt", "fit", f"{self.folder}/job.yaml", "--run", "a", *options)
        asks = re.compile(r"midstride join (\S+) on each")
        [self._address, *_] = wait_for(lambda: asks.findall(self.said("fit.txt")), "a rendezvous")

    def join(self) -> None:
        """Start a node."""
        self.nodes.append(self._start(f"node-{len(self._started)}.txt", "join", self._address, "--wait=120"))

    def wait_for_round(self, ranks: int) -> None:
        """Wait for a round that has so many ranks, after those that were waited for."""

        def found() -> int:
            rounds = re.findall(r"^round \d+: .* (\d+) ranks?\b", self.said("fit.txt"), re.MULTILINE)
            return next(
                (number for number, size in enumerate(rounds, 1) if int(size) == ranks and number > self.rounds), 0
            )

        self.rounds = wait_for(found, f"a round of {ranks} ranks")

    def _start(self, log: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.folder / log).open("ab") as out:
            command = [sys.executable, "-m", "midstride.engine", *arguments]
            self._started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        return self._started[-1]

    def said(self, log: str = "*.txt") -> str:
        """Return what was printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(log)))

    def close(self) -> None:
        """End what is left."""
        for process in self._started:
            signal_machine(process, signal.SIGCONT)
            signal_machine(process, signal.SIGKILL)
            process.wait()


def signal_machine(process: "subprocess.Popen[bytes]", by: signal.Signals) -> None:
    """Send a signal to all processes of a machine; SIGKILL is as power-off, but that connections are closed."""
    signal_all([process.pid, *descendants(process.pid)], by)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Return machines that end with the test."""
    found = Machines(tmp_path)
    yield found
    found.close()


def killed(machines: Machines) -> None:
    signal_machine(machines.nodes.pop(0), signal.SIGKILL)
    machines.wait_for_round(ranks=1)


def replaced(machines: Machines) -> None:
    killed(machines)
    machines.join()
    machines.wait_for_round(ranks=2)


def frozen(machines: Machines) -> None:
    signal_machine(machines.nodes[0], signal.SIGSTOP)
    machines.wait_for_round(ranks=1)
    signal_machine(machines.nodes[0], signal.SIGCONT)
    machines.wait_for_round(ranks=2)


def leaves(machines: Machines) -> None:
    leaving = machines.nodes.pop(0)
    leaving.terminate()
    machines.wait_for_round(ranks=1)
    assert leaving.wait(60) == 75, machines.said()


def rank_killed(machines: Machines) -> None:
    ranks = [
        pid for pid in descendants(machines.nodes[0].pid) if b"nodes.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    signal_all(ranks[:1])
    machines.wait_for_round(ranks=2)


def launcher_killed(machines: Machines) -> None:
    machines.launcher.kill()
    machines.launcher.wait()
    machines.fit()
    machines.wait_for_round(ranks=2)


def stopped(machines: Machines) -> None:
    machines.launcher.terminate()
    assert machines.launcher.wait(60) == 75, machines.said()
    assert [node.wait(60) for node in machines.nodes] == [75, 75], machines.said()
    machines.nodes.clear()
    machines.fit()
    machines.join()
    machines.join()
    machines.wait_for_round(ranks=2)


#: what happens while two nodes train -> how many train in the rounds from then on, and the words of why
STRIKES: dict[Callable[[Machines], None], tuple[list[int], list[str]]] = {
    killed: ([2, 1], ["was silent for 5 s: it is left out"]),
    replaced: ([2, 1, 2], ["was silent for 5 s: it is left out", "can train as well"]),
    frozen: ([2, 1, 2], ["was silent for 5 s: it is left out", "can train as well"]),
    leaves: ([2, 1], ["leaves: asked to stop"]),
    rank_killed: ([2, 2], ["ended without a word"]),
    launcher_killed: ([2], []),
    stopped: ([2, 2], [""]),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "strike" in metafunc.fixturenames:
        chosen = [*STRIKES] if metafunc.config.getoption("--laws") == "all" else [killed]
        metafunc.parametrize("strike", chosen, ids=lambda strike: strike.__name__)


@pytest.mark.timeout(600)
def test_what_happens_to_nodes_changes_no_bit(
    strike: Callable[[Machines], None], tmp_path: Path, machines: Machines
) -> None:
    slow = tmp_path / "slow"
    job = tiny_job(tmp_path, steps=STEPS, lingers=str(slow))
    slow.touch()
    machines.fit()
    machines.join()
    machines.join()
    machines.wait_for_round(ranks=2)
    before = machines.rounds
    wait_for((tmp_path / "mark").exists, "a step behind a snapshot")
    strike(machines)
    slow.unlink()
    assert machines.launcher.wait(300) == 0, machines.said()
    assert [node.wait(60) for node in machines.nodes] == [0] * len(machines.nodes), machines.said()
    assert results(job, "a") == undisturbed(tmp_path / "undisturbed")
    assert audit(job.run_url("a")).is_clean
    # The next launch completes the log of an attempt whose launcher was killed, once its world has ended.
    seen = slice(-1, None) if strike is launcher_killed else slice(before - 1, None)
    rounds = report_of(Run(job, "a")).rounds[seen]
    sizes, causes = STRIKES[strike]
    assert [one.ranks for one in rounds] == sizes
    for one, why in zip(rounds[1:], causes, strict=True):
        assert why in one.why
        assert one.resumed_from is not None
    assert [attempt.outcome for attempt in Run(job, "a").attempts.attempts()][-1] == "done"


def undisturbed(folder: Path) -> dict[str, bytes]:
    """Return what the same run leaves that one process trains."""
    tiny_job(folder, processes=1, steps=STEPS)
    job = TrainingJob.load(folder / "job.yaml", ["world.strategy=ddp", "world.lanes=2"])
    train_forked(job, "a")
    return results(job, "a")


@pytest.mark.timeout(300)
def test_an_error_of_the_job_ends_all_nodes_at_once(tmp_path: Path, machines: Machines) -> None:
    job = tiny_job(tmp_path, fail_at=2)
    machines.fit(nodes="1", lanes=None)
    machines.join()
    assert machines.launcher.wait(200) == 2, machines.said()
    assert machines.nodes[0].wait(60) == 2, machines.said()
    assert "the model is not in the mood" in machines.said("fit.txt")
    [attempt] = Run(job, "a").attempts.attempts()
    assert (attempt.outcome, len(attempt.rounds)) == ("user_error", 1)
