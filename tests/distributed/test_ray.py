"""`world.on: ray`: a real Ray gives nodes, and another for one that is lost; no bit changes. `make test-ray`."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job, train_forked, wait_for
from support.limit import LIMIT_S
from support.machines import Machine, found_below

from midstride.engine.config.job import TrainingJob
from midstride.engine.processes.lifetime import processes_with_env, signal_all
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: make test-ray")

STEPS = 64


class Cluster:
    """A Ray of two machines beside the head, in processes of its own.

    Args:
        folder: that it keeps its files in; a short one, as sockets have short names.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        for _ in range(3):  # Ray gives its own processes 30 s to come up, which is too short on a busy machine
            self.process = self._started()
            assert self.process.stdout is not None
            if found := next((line for line in self.process.stdout if line.startswith(b"{")), None):
                break
            self.close()
        assert found is not None, "Ray did not come up"
        said = json.loads(found)
        self.address: str = said["address"]
        self.machines: list[int] = said["machines"]

    def _started(self) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join(filter(None, sys.path))
        there = {**os.environ, "TMPDIR": self._folder, "RAY_TMPDIR": self._folder, "PYTHONPATH": path}
        command = [sys.executable, "-m", "support.ray_cluster"]
        return subprocess.Popen(command, env=there, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def training(self) -> list[int]:
        """Return which machines have a rank."""
        return [number for number, pid in enumerate(self.machines) if found_below(pid, "machines.rank")]

    def remove(self, number: int) -> None:
        """Lose a machine."""
        self._tell(b"remove %d\n" % number)

    def add(self) -> None:
        """Have one machine more."""
        self._tell(b"add\n")
        assert self.process.stdout is not None
        self.machines.append(json.loads(self.process.stdout.readline()))

    def _tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=LIMIT_S)
        wait_for(lambda: not self._end_leftovers(), "Ray to end")
        self.process.wait()

    def _end_leftovers(self) -> list[int]:
        left = processes_with_env("RAY_TMPDIR", self._folder)
        signal_all(left)
        return left


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Return a cluster that ends with the test."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Cluster(folder)
        yield made
        made.close()


def test_a_machine_that_ray_loses_is_replaced_and_no_bit_changes(cluster: Cluster, tmp_path: Path) -> None:
    slow, log = tmp_path / "slow", tmp_path / "fit.txt"
    job = tiny_job(tmp_path, steps=STEPS, lingers=str(slow))
    slow.touch()
    arguments = json.dumps({"address": cluster.address, "resources": {"machine": 1}})
    chosen = {"strategy": "ddp", "lanes": 2, "nodes": "1:2", "on": "ray", "on_args": arguments}
    chosen |= {"rendezvous": "127.0.0.1:0", "grow_after_s": 0, "processes": 1}
    options = [f"--set=world.{key}={value}" for key, value in chosen.items()]
    with log.open("wb") as out:
        command = [sys.executable, "-m", "midstride.engine", "fit", f"{tmp_path}/job.yaml", "--run", "a", *options]
        launcher = Machine(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
    try:
        wait_for(lambda: "2 ranks" in log.read_text() or launcher.process.poll() is not None, "two nodes")
        wait_for(lambda: (tmp_path / "mark").exists() or launcher.process.poll() is not None, "a step")
        assert launcher.process.poll() is None, log.read_text()
        cluster.remove(cluster.training()[0])
        wait_for(lambda: ", 1 rank" in log.read_text(), "a round of the node that is left")
        cluster.add()
        wait_for(lambda: "can train as well" in log.read_text(), "a round with another machine")
        slow.unlink()
        assert launcher.wait(LIMIT_S) == 0, log.read_text()
    finally:
        launcher.signal(signal.SIGKILL)
        launcher.process.wait()
    wait_for(lambda: not cluster.training(), "nodes to end")
    assert [one.ranks for one in report_of(Run(job, "a")).rounds][-3:] == [2, 1, 2]
    assert audit(job.run_url("a")).is_clean
    calm = tmp_path / "undisturbed"
    tiny_job(calm, processes=1, steps=STEPS)
    train_forked(TrainingJob.load(calm / "job.yaml", ["world.strategy=ddp", "world.lanes=2"]), "a")
    assert results(job, "a") == results(TrainingJob.load(calm / "job.yaml"), "a")
