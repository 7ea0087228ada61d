"""`midstride rank` under torchrun: a machine that is lost changes no bit of a run in lanes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job, train_forked, wait_for

from midstride.engine.cli.app import main
from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import descendants
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run import Run
from midstride.engine.strategies.rendezvous import serve_store

Start = Callable[[TrainingJob], "subprocess.Popen[bytes]"]
#: seconds between polls and until a silent agent is left out: short, so that the test is
RENDEZVOUS = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


@pytest.fixture
def start_machine(tmp_path: Path) -> Iterator[Start]:
    """Return what starts torchrun's agent with one rank: a machine of a world of one or two."""
    store, machines = serve_store(), []

    def start(job: TrainingJob) -> "subprocess.Popen[bytes]":
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=elastic"]
        rank = ["--no-python", "--", sys.executable, "-m", "midstride.engine", "rank", f"{job.folder}/job.yaml"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *meeting, f"--rdzv-conf={RENDEZVOUS}"]
        chosen = ["--run", "a", "--set", "world.lanes=2"]
        with (tmp_path / f"machine-{len(machines)}.txt").open("wb") as log:
            environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = [*command, "--local-addr=127.0.0.1", *rank, *chosen]
            machines.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return machines[-1]

    yield start
    for machine in machines:
        machine.kill()
        machine.wait()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "comes_back" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--laws") == "all"
        metafunc.parametrize("comes_back", [False, True] if whole else [False])


@pytest.mark.timeout(400)
def test_a_machine_is_lost_and_the_run_ends_with_the_undisturbed_bits(
    comes_back: bool, tmp_path: Path, start_machine: Start
) -> None:
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
        assert second.wait(300) == 0, (tmp_path / "machine-2.txt").read_text()
    assert first.wait(300) == 0, (tmp_path / "machine-0.txt").read_text()
    said = "".join(path.read_text() for path in tmp_path.glob("machine-*.txt"))
    assert said.count(", 2 processes") == 1 + comes_back, said
    assert results(job, "a") == undisturbed(tmp_path / "undisturbed")
    assert audit(job.run_url("a")).is_clean


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
