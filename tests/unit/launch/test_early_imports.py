"""What a command that trains has imported before it has read its job."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.launchers import LAUNCHERS
from midstride.engine.errors import StrategyUnavailable
from midstride.engine.launch import early_imports, job_fork_server
from midstride.engine.launch.launchers.build import build_launcher
from midstride.engine.processes import fork_server

JOB = {"name": "job", "module": "model:Net", "data": "model:Data", "trainer": {"max_epochs": 1}}

#: a command line -> whether it trains
COMMANDS = {
    "fit job.yaml": True,
    "train job.yaml --run one": True,
    "nightly job.yaml": True,
    "fit --help": False,
    "report runs/one": False,
    "": False,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_asks_for_nothing_more(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(job_fork_server, "forking", lambda environment, *modules: asked.append(modules))
    monkeypatch.setattr(job_fork_server, "build_launcher", lambda name, folder: build_launcher(launcher, folder))
    try:
        job_fork_server.job_fork_server(TrainingJob.model_validate(JOB))
    except StrategyUnavailable:
        pytest.skip(f"{launcher} is not installed")
    assert {*asked[0]} <= {*early_imports.MODULES}


@pytest.mark.parametrize("line", COMMANDS)
def test_what_trains_has_a_fork_server_that_suits_a_job(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def forking(environment: dict[str, str], *modules: str) -> nullcontext[None]:
        started.append(environment)
        return nullcontext()

    monkeypatch.setattr(early_imports, "forking", forking)
    monkeypatch.setattr(job_fork_server, "forking", forking)
    early_imports.early_imports(line.split())
    assert len(started) == COMMANDS[line]
    job_fork_server.job_fork_server(TrainingJob.model_validate(JOB))
    early, needed = (fork_server._early(environment) for environment in (started[0], started[-1]))
    assert early == needed
