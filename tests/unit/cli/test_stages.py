"""`midstride prepare | status | evaluate | compare`: the stages beside `fit`."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.flow_runs import STEPS, tiny_job, train_forked

from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run

pytestmark = pytest.mark.usefixtures("forked_worlds")


def test_stages_of_a_training_are_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path, processes=1)
    path = str(tmp_path / "job.yaml")

    def said(*arguments: str) -> Any:
        assert run(arguments[0], path, *arguments[1:], "--json") == 0
        return json.loads(capsys.readouterr().out)

    assert said("prepare")["files"] == 1
    new = said("status", "--run", "first")
    assert (new["state"], new["attempts"], new["url"]) == ("new", 0, job.run_url("first"))
    train_forked(job, "first")
    done = said("status", "--run", "first")
    assert (done["state"], done["step"]) == ("done", STEPS)
    scores = said("evaluate", "--run", "first")
    assert set(scores) == {"test/accuracy"}
    Run(job, "first").save_job()
    assert run("test", job.run_url("first"), "--weights", "last", "--json") == 0
    of_last = json.loads(capsys.readouterr().out)
    assert said("evaluate", "--run", "first", "--step", str(STEPS)) == of_last
    assert run("evaluate", path, "--run", "first", "--step", "7") == 2
    assert "has no snapshot of step 7: choose one of" in capsys.readouterr().err
    none = job.run_url("nope")
    for command in (
        ("evaluate", path, "--run", "nope"),
        ("test", none),
        ("predict", none, "--output", "a.npz"),
        ("export", none, "--format", "safetensors"),
        ("export", none, "--to", "tensorboard"),
        ("diff", job.run_url("first"), none),
    ):
        assert run(*command) == 2
        assert f"there is no run 'nope' in {job.store_url}: it has first" in capsys.readouterr().err
    better = said("compare", "--run", "first")
    assert (better["promoted"], better["challenger"], better["champion_run"]) == (True, scores, None)
    assert ModelRegistry.of(job).current() is None, "without --promote it only compares"
    promoted = said("compare", "--run", "first", "--promote")
    assert promoted == better | {"champion_run": "first", "champion_weights": promoted["champion_weights"]}
    assert Path(promoted["champion_weights"], "manifest.json").exists()
    champion = ModelRegistry.of(job).current()
    assert champion is not None
    assert champion.run == "first"
    assert said("compare", "--run", "first", "--promote") == promoted, "again, it changes nothing"
    assert len(ModelRegistry.of(job).champions()) == 1


def test_a_job_without_monitor_compares_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_job(tmp_path, processes=1)
    assert run("compare", str(tmp_path / "job.yaml"), "--run", "a", "--set", "monitor=null") == 2
    assert "monitor: is missing" in capsys.readouterr().err


def test_a_run_of_other_arguments_is_compared_with_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tiny_job(tmp_path, processes=1, slow_rank=1), "first").save_job()
    changed = ("--set", "module_args.slow_rank=2", "--set", "module_args.fail_at=3")
    assert run("compare", str(tmp_path / "job.yaml"), "--run", "first", *changed) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "module_args.slow_rank: run first has trained with 1, this job has 2; add --set" in told
    assert "module_args.fail_at: run first has trained with no value, this job has 3; leave it out" in told
