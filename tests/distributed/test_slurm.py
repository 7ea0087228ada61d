"""`world.on: slurm`: a real Slurm gives the nodes, takes them away, and has nothing left of them; no bit changes."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.flow_runs import results, tiny_job, train_forked, wait_for
from support.leaks import LASTING_PROCESSES
from support.limit import LIMIT_S
from support.slurm import MISSING, Slurm, can_mount
from support.tiers import everything

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.nodes import Nodes
from midstride.engine.errors import JobError, WorldError
from midstride.engine.launch.clusters.base import Cluster, NodeRequest
from midstride.engine.launch.clusters.slurm import Slurm as SlurmCluster
from midstride.engine.processes.lifetime import descendants, signal_all
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of
from midstride.engine.session.heartbeat import HeartbeatReading, Phase

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"apt-get install slurm-wlm munge: there is no {', '.join(MISSING)}"
)

STEPS = 64


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of three nodes, in order for each test."""
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    LASTING_PROCESSES.update(cluster.pids)
    yield cluster
    cluster.close()


class Launch:
    """`midstride fit` of a job whose nodes come from Slurm.

    Args:
        cluster: that gives them.
        folder: of the job.
        world: what it says besides.
    """

    def __init__(self, cluster: Slurm, folder: Path, **world: object) -> None:
        self.cluster, self._log = cluster, folder / "fit.txt"
        chosen = {"strategy": "ddp", "processes": 1, "lanes": 2, "nodes": "1:2", "on": "slurm"}
        chosen |= {"rendezvous": "127.0.0.1:0", "grow_after_s": 0, **world}
        options = [f"--set=world.{key}={value}" for key, value in chosen.items()]
        command = [sys.executable, "-m", "midstride.engine", "fit", f"{folder}/job.yaml", "--run", "a", *options]
        with self._log.open("ab") as out:
            environment = {**os.environ, **cluster.environment}
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def said(self) -> str:
        """Return what was printed."""
        return self._log.read_text()

    def wait_for(self, words: str) -> None:
        """Wait until it says so."""
        wait_for(lambda: words in self.said() or self.process.poll() is not None, words)
        assert words in self.said(), self.said()

    def close(self) -> None:
        """End what is left."""
        signal_all([*descendants(self.process.pid), self.process.pid])
        self.process.wait()


def undisturbed(launch: Launch) -> None:
    """Nothing happens."""


def powered_off(launch: Launch) -> None:
    launch.cluster.power_off("n1")
    launch.wait_for("was silent for 5 s: it is left out")


def cancelled(launch: Launch) -> None:
    [one, _] = launch.cluster.ask("squeue --noheader --array --format=%i").split()
    launch.cluster.ask(f"scancel {one}")
    launch.wait_for("leaves: asked to stop")


def preempted(launch: Launch) -> None:
    launch.cluster.ask("sbatch --partition=urgent --nodes=2 --job-name=urgent --output=/dev/null --wrap=hostname")
    launch.wait_for("leaves: asked to stop")


#: what happens while two nodes train -> how many train in the rounds from then on
STRIKES: dict[Callable[[Launch], None], list[int]] = {
    powered_off: [2, 1],
    undisturbed: [2],
    cancelled: [2, 1],
    preempted: [2, 1],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "strike" in metafunc.fixturenames:
        chosen = [*STRIKES] if metafunc.config.getoption("--laws") == "all" else [*STRIKES][:1]
        metafunc.parametrize("strike", chosen, ids=lambda strike: strike.__name__)


@pytest.fixture
def launched(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Return what launches the job in the folder of this test, slow at its eighth step; it ends with the test."""
    found: list[Launch] = []

    def launch(**world: object) -> Launch:
        found.append(Launch(slurm, tmp_path, **world))
        return found[-1]

    yield launch
    for one in found:
        one.close()
    slurm.ask("scancel --name=midstride-a")  # of a test that has failed
    wait_for(lambda: not slurm.jobs(), "an end of all jobs")
    LASTING_PROCESSES.update(slurm.repair())


def test_what_slurm_does_to_nodes_changes_no_bit(
    strike: Callable[[Launch], None], tmp_path: Path, launched: Callable[..., Launch]
) -> None:
    slow = tmp_path / "slow"
    job = tiny_job(tmp_path, steps=STEPS, lingers=str(slow))
    slow.touch()
    launch = launched()
    launch.wait_for("2 ranks")
    wait_for((tmp_path / "mark").exists, "a step behind a snapshot")
    strike(launch)
    slow.unlink()
    assert launch.process.wait(LIMIT_S) == 0, launch.said()
    wait_for(lambda: not launch.cluster.jobs(), "an end of all jobs")
    assert results(job, "a") == of_one_process(tmp_path / "alone")
    assert audit(job.run_url("a")).is_clean
    sizes = [one.ranks for one in report_of(Run(job, "a")).rounds]
    assert sizes[sizes.index(2) :] == STRIKES[strike]  # one node may have come before the other


def of_one_process(folder: Path) -> dict[str, bytes]:
    """Return what the same run leaves that one process trains."""
    tiny_job(folder, processes=1, steps=STEPS)
    job = TrainingJob.load(folder / "job.yaml", ["world.strategy=ddp", "world.lanes=2"])
    train_forked(job, "a")
    return results(job, "a")


@everything
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_srun_starts_are_a_world(nodes: int, slurm: Slurm, tmp_path: Path) -> None:
    if nodes > 1 and not can_mount():
        pytest.skip("names of nodes need root, unshare and mount")
    job = tiny_job(tmp_path, steps=STEPS)
    rank = [sys.executable, "-m", "midstride.engine", "rank", f"{job.folder}/job.yaml", "--run", "a"]
    command = ["srun", f"--nodes={nodes}", "--ntasks=2", "--overcommit", *rank, "--set", "world.lanes=2"]
    environment = {**os.environ, **slurm.environment}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(", 2 processes") == 1, ended.stderr
    assert results(job, "a") == of_one_process(tmp_path / "alone")


def test_a_queued_job_is_no_hang_and_a_stop_cancels_it(tmp_path: Path, launched: Callable[..., Launch]) -> None:
    tiny_job(tmp_path)
    launch = launched(on_args="{hold: true}")
    wait_for(lambda: phases() == [Phase.WAITING], "a look at the queue")
    assert launch.cluster.jobs() == ["0:PENDING:", "1:PENDING:"]
    launch.process.terminate()
    assert launch.process.wait(LIMIT_S) == 75, launch.said()
    assert launch.cluster.jobs() == []


def phases() -> list[Phase]:
    """Return what launchers believe rank 0 to do."""
    paths = Path(tempfile.gettempdir()).glob("midstride-a-*/heartbeat-rank-00000")
    return [HeartbeatReading.read(path).phase for path in paths]


@everything
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_launcher_that_ends_leaves_no_job(
    nodes: str, by: signal.Signals, tmp_path: Path, launched: Callable[..., Launch]
) -> None:
    slow = tmp_path / "slow"
    tiny_job(tmp_path, steps=STEPS, lingers=str(slow))
    slow.touch()
    launch = launched(nodes=nodes)
    wait_for((tmp_path / "mark").exists, "a step behind a snapshot")
    launch.process.send_signal(by)
    assert launch.process.wait(LIMIT_S) == {signal.SIGTERM: 75, signal.SIGKILL: -9}[by], launch.said()
    wait_for(lambda: not launch.cluster.jobs(), "an end of all jobs")


@everything
@pytest.mark.parametrize(
    ("nodes", "on_args", "act", "how"),
    [
        ("2", "{}", "scancel --name=midstride-a", "(cancelled)"),
        ("1:2", "{}", "scancel --name=midstride-a", "(cancelled)"),
        ("1:2", "{time: 2}", "", "(failed)"),
    ],
)
def test_a_job_that_slurm_ends_has_taken_a_snapshot_and_is_named(
    nodes: str, on_args: str, act: str, how: str, tmp_path: Path, launched: Callable[..., Launch]
) -> None:
    slow = tmp_path / "slow"
    job = tiny_job(tmp_path, steps=STEPS, lingers=str(slow))
    file = tmp_path / "job.yaml"
    file.write_text(file.read_text().replace("every_steps: 5", "every_steps: 1000"))
    slow.touch()
    launch = launched(nodes=nodes, on_args=on_args)
    wait_for((tmp_path / "mark").exists, "a step behind a snapshot")
    if act:
        launch.cluster.ask(act)
    assert launch.process.wait(LIMIT_S) == 1, launch.said()
    assert f"has ended {how}, and no node is left" in launch.said()
    taken = Run(job, "a").catalog.snapshots()
    # Before the last generation there is one more where the second node came late to the first.
    steps = [one.position.step for one in taken if one.generation == taken[-1].generation]
    assert [step >= 8 for step in steps] == [True], [one.name for one in taken]
    assert [attempt.outcome for attempt in Run(job, "a").attempts.attempts()] == ["died"]


def test_what_slurm_refuses_is_said_in_its_words(slurm: Slurm) -> None:
    refused = pytest.raises(JobError, match=r"sbatch refuses: .*invalid partition specified: none")
    with mock.patch.dict(os.environ, slurm.environment), refused as error:
        cluster(partition="none").start("head:1", "5" * 64)
    assert "it was asked: sbatch --parsable --nodes=1 --array=0-3 --requeue" in str(error.value)


@everything
def test_a_controller_that_is_away_is_worth_a_retry(slurm: Slurm) -> None:
    away = slurm.folder / "away.conf"
    away.write_text(slurm.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1 #"))
    refused = pytest.raises(WorldError, match=r"sbatch refuses: .*[Uu]nable to contact slurm controller")
    with mock.patch.dict(os.environ, {"SLURM_CONF": str(away)}), refused:
        cluster().start("head:1", "5" * 64)


def cluster(**arguments: object) -> Cluster:
    return SlurmCluster(NodeRequest("a", "/runs/a", Nodes(1, 4, lanes=4), arguments, 20.0))
