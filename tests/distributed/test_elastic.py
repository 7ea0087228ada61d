"""`midstride rank` under torchrun: a machine that is lost changes no bit of a run in lanes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.etcd import Etcd, why_no_etcd
from support.flow_runs import results, tiny_job, train_forked, wait_for
from support.launched import at
from support.limit import LIMIT_S
from support.ports import free_ports
from support.tiers import everything

from midstride.engine.cli.app import main
from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import descendants
from midstride.engine.processes.loopback import ADDRESS
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run import Run
from midstride.engine.strategies.rendezvous import serve_store

Start = Callable[..., "subprocess.Popen[bytes]"]
#: seconds between polls and until a silent agent is left out: short, so that the test is
CONFIGURATION = {
    "c10d": "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1",
    "etcd-v2": "last_call_timeout=1",
}


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if why := why_no_etcd():
        pytest.skip(why)
    server = Etcd(tmp_path / "etcd")
    yield server
    server.kill()


@pytest.fixture
def start_machine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Return what starts torchrun's agent with one rank: a machine of a world of one or two."""
    backend = request.node.callspec.params["backend"] if "backend" in request.fixturenames else "etcd-v2"
    store = serve_store() if backend == "c10d" else None
    address = f"127.0.0.1:{store.port}" if store else request.getfixturevalue("etcd").address
    machines: list[subprocess.Popen[bytes]] = []

    def start(job: TrainingJob, name: str = "elastic") -> "subprocess.Popen[bytes]":
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
        meeting = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={address}", f"--rdzv-id={name}"]
        rank = ["--no-python", "--", *TOGETHER, str(tmp_path / "mark"), *RANK, f"{job.folder}/job.yaml", *CHOSEN]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *meeting]
        command = [*command, f"--rdzv-conf={CONFIGURATION[backend]}", "--local-addr=127.0.0.1", *rank]
        with (tmp_path / f"machine-{len(machines)}.txt").open("wb") as log:
            environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            machines.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return machines[-1]

    yield start
    for machine in machines:
        machine.kill()
        machine.wait()


#: what a rank is, and of which run
RANK = (sys.executable, "-m", "midstride.engine", "rank")
CHOSEN = ("--run", "a", "--set", "world.lanes=2")
#: a rank that is alone waits until the run has been at its mark: on a busy machine agents may start far apart
TOGETHER = ("sh", "-c", 'while [ "$WORLD_SIZE" = 1 ] && [ ! -e "$0" ]; do sleep 0.1; done; exec "$@"')
#: where agents meet, and whether the one that is lost comes back
LOST = [("c10d", False), ("c10d", True), ("etcd-v2", False), ("etcd-v2", True)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--laws") == "all"
    if "comes_back" in metafunc.fixturenames:
        metafunc.parametrize(("backend", "comes_back"), LOST if whole else LOST[:1])


def said(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("machine-*.txt")))


def test_a_lost_machine_changes_no_bit(backend: str, comes_back: bool, tmp_path: Path, start_machine: Start) -> None:
    slow = tmp_path / "slow"
    job = tiny_job(tmp_path, wait_at=8, lingers=str(slow))
    first, second = start_machine(job), start_machine(job)
    wait_for((tmp_path / "mark").exists, "the step at which the model waits")
    [snapshot] = wait_for(Run(job, "a").catalog.snapshots, "the snapshot before it")
    assert snapshot.position.step == 5
    ranks = descendants(second.pid)
    assert ranks
    second.kill()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "the ranks to end with their agent")
    if comes_back:
        slow.touch()  # the one that is left shall not be done before
        second = start_machine(job)
    (tmp_path / "mark-over").touch()
    if comes_back:
        wait_for(lambda: descendants(second.pid), "the rank of the machine that is back")
        slow.unlink()
        assert second.wait(LIMIT_S) == 0, said(tmp_path)
    assert first.wait(LIMIT_S) == 0, said(tmp_path)
    assert said(tmp_path).count(", 2 processes") == 1 + comes_back, said(tmp_path)
    assert results(job, "a") == undisturbed(tmp_path / "undisturbed")
    assert audit(job.run_url("a")).is_clean


@everything
def test_restarted_machines_resume_after_etcd_died(tmp_path: Path, etcd: Etcd, start_machine: Start) -> None:
    job = tiny_job(tmp_path, wait_at=8)
    machines = [start_machine(job), start_machine(job)]
    wait_for((tmp_path / "mark").exists, "the step at which the model waits")
    wait_for(Run(job, "a").catalog.snapshots, "the snapshot before it")
    etcd.kill()
    assert all(machine.wait(LIMIT_S) != 0 for machine in machines), said(tmp_path)
    etcd.start()
    machines = [start_machine(job, "another"), start_machine(job, "another")]  # the first is closed for good
    assert [machine.wait(LIMIT_S) for machine in machines] == [0, 0], said(tmp_path)
    assert said(tmp_path).count(", 2 processes") == 2, said(tmp_path)
    assert results(job, "a") == undisturbed(tmp_path / "undisturbed")


@everything
def test_ranks_that_mpirun_starts_are_a_world(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    job = tiny_job(tmp_path)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    ended = subprocess.run([*mpirun, *RANK, f"{job.folder}/job.yaml", *CHOSEN], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(", 2 processes") == 1, ended.stderr
    assert results(job, "a") == undisturbed(tmp_path / "undisturbed")


#: rank 0 stands still as it writes its first snapshot, and rank 1 fails at its next step: its writer waits for rank 0,
#: and is woken by the end of rank 0 while the interpreter of rank 1 ends
REFUSED = """\
import os
import sys
import threading
import time
from pathlib import Path
from midstride.engine import Trainer
from midstride.engine.storage.local import LocalStore
from midstride.engine.checkpointing import run_store
import model

run_store.GRACE_S = 0.1
if first := os.environ["RANK"] == "0":
    Path("first").write_text(str(os.getpid()))
    LocalStore.write_all = lambda *_: threading.Event().wait()


class EndsRank0:
    kill, sleep = staticmethod(os.kill), staticmethod(time.sleep)

    def __init__(self, process):
        self.process = process

    def __del__(self):  # once the interpreter ends
        self.kill(self.process, 9)  # the modules are gone
        self.sleep(1)


class Net(model.Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and not first:
            sys.ends_rank_0 = EndsRank0(int(Path("first").read_text()))
            assert "midstride-writer" in [thread.name for thread in threading.enumerate()]
            raise ValueError("this is refused")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    Trainer(strategy="ddp", max_steps=16, snapshots={"every_steps": 5}).fit(Net(), model.Data("data"), run="runs/a")
"""


@pytest.mark.parametrize("started", ["midstride rank", "a script"])
def test_a_refused_rank_ends_with_2_while_its_snapshot_waits(started: str, tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    (tmp_path / "refused.py").write_text(REFUSED)
    command = [*RANK, "job.yaml", "--run", "a", "--set", "module=refused:Net", "--set", "world.launcher="]
    if started == "a script":
        command = [sys.executable, "refused.py"]
    [port] = free_ports(1)
    ranks = []
    for rank in range(2):
        environment = {**os.environ, **at(rank, 2, 2), "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen(command, cwd=job.folder, env=environment, stderr=subprocess.PIPE, text=True))
    said = ranks[1].communicate(timeout=LIMIT_S)[1]
    ranks[0].kill()  # it has lost rank 1
    ranks[0].communicate()
    assert "this is refused" in said
    assert ranks[1].returncode == 2, said


def undisturbed(folder: Path) -> dict[str, bytes]:
    """Return what the same run leaves that one process trains."""
    tiny_job(folder, processes=1)
    job = TrainingJob.load(folder / "job.yaml", ["world.strategy=ddp", "world.lanes=2"])
    train_forked(job, "a")
    return results(job, "a")


def test_alone_it_says_what_starts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments=["rank", f"{job.folder}/job.yaml", "--run", "a"])
    assert ended.value.code == 2
    assert "Put torchrun, srun or mpirun before it" in " ".join(capsys.readouterr().err.split())
