"""Attempts that are forked from one process that has imported torch: the bits of fresh ones, and the code of today."""

from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.launch.job_fork_server import job_fork_server
from midstride.engine.launch.launch import launch
from midstride.engine.processes.fork_server import ForkedSupervisor, ForkServer
from midstride.engine.runs.run import Run


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[ForkedSupervisor]:
    """Every supervisor that was forked, for an attempt each."""
    made: list[ForkedSupervisor] = []
    start = ForkServer.start_supervisor

    def noted(self: ForkServer, *arguments: object) -> ForkedSupervisor | None:
        if (started := start(self, *arguments)) is not None:
            made.append(started)
        return started

    monkeypatch.setattr(ForkServer, "start_supervisor", noted)
    return made


def attempt(job: TrainingJob, run: str) -> str:
    """How an attempt of `run` ends."""
    return launch(Run(job, run)).kind


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return what an attempt of fresh processes leaves; which launcher starts them changes no bit."""
    job = tiny_job(tmp_path_factory.mktemp("fresh"), launcher="torchrun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServer, "start_supervisor", None)  # nothing is forked
        assert attempt(job, "fresh") == "done"
    return results(job, "fresh")


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_forked_attempts_end_with_the_bits_of_fresh_processes(
    launcher: str, fresh: dict[str, bytes], tmp_path: Path, forked: list[ForkedSupervisor]
) -> None:
    job = tiny_job(tmp_path, launcher=launcher)
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=1, step=12, phase="forward")
    with pytest.MonkeyPatch.context() as patch, job_fork_server(job):
        patch.setenv(*next(iter(plan.environment.items())))
        assert attempt(job, "killed") == "died"
        assert attempt(job, "killed") == "done"
    assert (tmp_path / "plan" / "fired-000").exists()
    assert len(forked) == 2
    assert results(job, "killed") == fresh


def test_an_attempt_runs_what_the_files_say_when_it_begins(
    fresh: dict[str, bytes], tmp_path: Path, forked: list[ForkedSupervisor]
) -> None:
    job = tiny_job(tmp_path, launcher="spawn")
    source = (tmp_path / "model.py").read_text()
    begin = "    def training_step(self, "
    assert begin in source
    head, _, rest = source.partition(begin)
    line, _, body = rest.partition("\n")
    with job_fork_server(job):
        (tmp_path / "model.py").write_text(f"{head}{begin}{line}\n        raise ValueError('a bug')\n{body}")
        assert attempt(job, "mended") == "user_error"
        (tmp_path / "model.py").write_text(source)
        assert attempt(job, "mended") == "done"
    assert len(forked) == 2
    assert results(job, "mended") == fresh
