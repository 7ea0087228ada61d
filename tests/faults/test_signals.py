"""Signals to a whole launched world: whichever of its processes gets one, all ranks act on it."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.flow_runs import STEPS, Command, results, tiny_job, train_forked, wait_for
from support.limit import LIMIT_S
from support.metadata_server import MetadataServer, metadata_server

from midstride.engine.config.job import TrainingJob
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.heartbeat import HeartbeatReading
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.position import Position
from midstride.engine.storage.store import Store

NEVER = 1000


class Night:
    """A run of `midstride fit` whose processes can be found."""

    def __init__(self, folder: Path, job: TrainingJob) -> None:
        self.folder, self.job = folder, job
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.store = Store.open(job.run_url("night"))
        self.commands: list[Command] = []

    def fit(self) -> Command:
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        arguments = ["fit", str(self.folder / "job.yaml"), "--run", "night"]
        self.commands.append(Command(arguments, environment, self.folder / "fit.log"))
        return self.commands[-1]

    def rank(self, rank: int) -> HeartbeatReading:
        found = list(self.temporary.glob(f"midstride-*/heartbeat-rank-{rank:05d}"))
        return HeartbeatReading.read(found[0]) if found else HeartbeatReading()

    def reaches(self, step: int) -> None:
        wait_for(lambda: self.rank(1).step >= step, f"step {step}")

    def snapshots(self) -> list[Position]:
        return [snapshot.position for snapshot in SnapshotCatalog(self.store).snapshots()]


@pytest.fixture
def spot() -> Iterator[MetadataServer]:
    with metadata_server("gcp") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCE_METADATA_HOST", server.address)
        yield server


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    text = "snapshots: {url: runs, every_steps: 5}"
    slow = tmp_path / "slow"  # for as long as it is there, a step takes two seconds: a life does not end too early
    slow.touch()
    tiny_job(tmp_path, steps=2 * STEPS, lingers=str(slow))
    path = tmp_path / "job.yaml"
    world = 'world: {"preemption_notice": "gcp", '
    path.write_text(path.read_text().replace(text, text.replace("5", str(NEVER))).replace("world: {", world))
    night = Night(tmp_path, TrainingJob.load(path))
    yield night
    for command in night.commands:
        command.process.kill()
        command.process.wait()


def test_a_signal_to_any_process_or_a_notice_stops_a_world(night: Night, spot: MetadataServer) -> None:
    command = night.fit()
    night.reaches(2)
    os.kill(command.process.pid, signal.SIGUSR1)
    wait_for(night.snapshots, "the snapshot that was asked for")
    after = night.rank(1).step
    night.reaches(after + 1)
    os.kill(night.rank(1).pid, signal.SIGTERM)  # and no other process
    assert command.code() == 75, command.output
    stopped = night.snapshots()[-1]
    assert stopped.step > after

    spot.preempted = True
    command = night.fit()
    # It may be at the same step, in the validation after it.
    kept = wait_for(lambda: [one for one in night.snapshots() if one > stopped], "the snapshot of the notice")[-1]
    night.reaches(kept.step + 1)
    wait_for(lambda: "gcp announces that this machine will be taken away" in command.output, "the notice in the log")
    command.process.send_signal(signal.SIGTERM)
    assert command.code() == 75, command.output
    assert night.snapshots()[-1] > kept
    first, second = AttemptLog(night.store).attempts()
    assert (first.outcome, second.outcome) == ("stopped", "stopped")
    assert first.error.startswith(f"asked to stop, after step {stopped.step}; the run resumes from snapshot")
    assert second.resumed_step == stopped.step
    left = [path.name for path in night.temporary.iterdir()]
    assert not [name for name in left if name.startswith(("midstride-", "torchelastic_", "pymp-"))]

    (night.folder / "slow").unlink()
    train_forked(night.job, "night")
    train_forked(night.job, "calm")
    assert results(night.job, "night") == results(night.job, "calm")


def test_a_launcher_that_waits_for_a_store_can_be_stopped(night: Night) -> None:
    stops, answers_nobody = (signal.SIGTERM, signal.SIGINT), []
    for number in stops:
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(LIMIT_S)
        path = night.folder / f"{number.name}.yaml"
        path.write_text((night.folder / "job.yaml").read_text().replace("url: runs", "url: s3://bucket/runs"))
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {**os.environ, **keys, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
        arguments = ["fit", str(path), "--run", "night"]
        command = Command(arguments, environment, night.folder / f"{number.name}.log")
        night.commands.append(command)
        answers_nobody.append((server, command))
    for number, (server, command) in zip(stops, answers_nobody, strict=True):
        with server, server.accept()[0]:  # it is waiting for an answer now
            command.process.send_signal(number)
            assert command.code() == 75, command.output
        assert f"asked to stop by {number.name}; the same command resumes" in command.output
