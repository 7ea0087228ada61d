"""`midstride prepare | status | evaluate | compare`: the stages beside `fit`."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.flow_runs import STEPS, tiny_job, train_forked

from midstride.engine.cli.app import main
from midstride.engine.registry.registry import ModelRegistry

pytestmark = pytest.mark.usefixtures("forked_worlds")


def run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments=arguments)
    return ended.value.code


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
