"""The sweep of docs/examples/sweep: a trial is killed, and each ends with the bits of the undisturbed one."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from support.flow_runs import results, train_forked
from support.pages import ROOT

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run


def test_a_killed_trial_changes_no_bit_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = shutil.copytree(ROOT / "docs/examples/sweep", tmp_path / "sweep", ignore=shutil.ignore_patterns("runs"))
    monkeypatch.chdir(example)
    text = (example / "job.yaml").read_text()
    (example / "job.yaml").write_text(text.replace("max_epochs: 20", "max_epochs: 3"))
    (tmp_path / "faults").mkdir()
    plan = FaultPlan(tmp_path / "faults").add("kill", rank=0, step=50, phase="backward")
    program = runpy.run_path("sweep.py")
    with monkeypatch.context() as patch:
        patch.setenv(*next(iter(plan.environment.items())))
        decision = program["sweep"]()
    plan.assert_all_fired()

    with get_client(sync_client=True) as client:
        [shown] = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["sweep"])))
    table = json.loads(shown.data)
    assert len({row["run"] for row in table}) == len({row["settings"] for row in table}) == 4
    assert sum(row["restarts"] for row in table) == 1
    scores = [row["val/accuracy"] for row in table]
    assert scores == sorted(scores, reverse=True)
    for number, row in enumerate(table):
        job = TrainingJob.load("job.yaml", row["settings"].split(", "))
        outcomes = [attempt.outcome for attempt in Run(job, row["run"]).attempts.attempts()]
        assert outcomes == (["died", "done"] if row["restarts"] else ["done"])
        train_forked(job, reference := f"reference-{number}")
        assert results(job, row["run"]) == results(job, reference)
    champion = ModelRegistry.of(job).current()
    assert champion is not None
    assert decision.promoted
    assert champion.run == table[0]["run"]
