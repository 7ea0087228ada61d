"""Law 1 under the real horovodrun: killed, stopped, gone on with on two hosts, and the bits of the undisturbed run."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from laws.horovod_world import needs_horovod, run_horovod_ranks
from support.flow_runs import results, tiny_job

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.world import WorldOptions
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.launch.launch import launch
from midstride.engine.launch.rank import RankProcess
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.session import Session
from midstride.engine.storage.store import Store
from midstride.engine.world import World

pytestmark = needs_horovod

STOPPED = 75

#: Stands in for ssh: runs the command here, as if it were there.
SSH = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
def options(words):
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in ("-o", "-p", "-i") else words[1:]
    return words
command = options(options(words)[1:])  # after the host there may be more of them
os.execv("/bin/sh", ["/bin/sh", "-c", " ".join(command)])
"""


def on_horovod(job: TrainingJob, **world: object) -> TrainingJob:
    return job.model_copy(
        update={"world": WorldOptions.model_validate({"strategy": "horovod", "processes": 2, **world})}
    )


def fit(job: TrainingJob, run: str) -> None:
    """Be one rank, as a worker is that horovodrun starts."""
    os._exit(RankProcess(Session.create(Run(job, run).document(1)), World.from_environment()).run())


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_a_run_of_several_lives_ends_with_the_same_bits(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """Two worlds of two processes: what their sums give with three is told by laws/test_strategies.py."""
    job = on_horovod(tiny_job(tmp_path))
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=1, step=7, phase="backward")
    plan.add("stop", rank=0, step=11, phase="forward")
    environment.setenv(*next(iter(plan.environment.items())))
    outcome = launch(Run(job, "night"))
    assert (outcome.kind, outcome.rank) == ("died", 1)
    assert "rank 1 ended without a word" in outcome.error

    assert run_horovod_ranks(fit, job, "night", processes=2) == [STOPPED] * 2
    plan.assert_all_fired()

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    environment.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    lines: list[str] = []
    outcome = launch(Run(on_horovod(job, hosts="127.0.0.1:1,127.0.0.2:1"), "night"), on_line=lines.append)
    assert outcome.kind == "done", "\n".join(lines)
    attempts = AttemptLog(Store.open(job.run_url("night"))).attempts()
    assert [attempt.outcome for attempt in attempts] == ["died", "done"]

    assert run_horovod_ranks(fit, job, "calm", processes=2) == [0, 0]
    assert results(job, "night") == results(job, "calm")
