"""The flow of a night, on a real server; what ten nights may bring is in tests/faults."""

import os
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterName
from rich.console import Console
from support.flow_events import payload, told
from support.flow_runs import Command, wait_for
from support.nightly_job import House

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.registry.night_report import NightlyReport
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.snapshots.reader import weights_at
from midstride.flows.deployment import deploy
from midstride.flows.nightly import nightly
from midstride.flows.server_setup import create_pool
from midstride.flows.terminal import show_nightly_report


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def _night(house: House, day: int, **options: Any) -> NightlyReport:
    champions = f"[{{path: 'model:Champions', args: {{file: {house.folder}/champions}}}}]"
    return nightly(house.job(f"loggers={champions}"), house.date(day), **options)


def test_nights_fail_and_go_on(house: House, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house.comes_in(1, 1.0)
    assert _night(house, 1).champion == "level-2026-03-01"
    assert (tmp_path / "champions").exists(), "a tracker that did not answer ended no night"
    words = ["nightly", str(house.folder / "job.yaml"), "--date", house.date(1)]
    environment = {**os.environ, "PREFECT_API_URL": server}
    command = Command(words, environment, tmp_path / "output.txt")
    assert command.code() == 0, command.output
    assert "level-2026-03-01 was promoted: test/level 1: the first champion" in command.output
    assert "champion rollback" not in command.output, "there is none before the first"

    with pytest.raises(UserError, match="while preparing the data"):
        _night(house, 2)
    assert house.reigning() == (1, "level-2026-03-01")

    house.comes_in(3, 2.0)
    (tmp_path / "faults").mkdir()
    plan = FaultPlan(tmp_path / "faults").add("kill", rank=0, step=2, phase="forward")
    with monkeypatch.context() as patch:
        patch.setenv(*next(iter(plan.environment.items())))
        third = _night(house, 3)
    plan.assert_all_fired()
    assert house.attempts(3) == ["died", "done"]
    assert house.reigning() == (2, "level-2026-03-03")
    assert Path(third.weights, "manifest.json").exists()

    assert _night(house, 3) == third, "the same night again changes nothing"
    assert house.attempts(3) == ["died", "done"], "and trains nothing"

    house.comes_in(4, 2.0)
    assert _night(house, 4, if_new_data=True).verdict == "nothing new to train on; level-2026-03-03 stays champion"
    assert house.attempts(4) == []

    promoted = wait_for(lambda: _told(server, house, "promoted", 2), "an event for each promotion")
    assert [one.run for one in promoted] == ["level-2026-03-01", third.run]
    assert (promoted[1].weights, promoted[1].over, promoted[1].margin) == (third.weights, 1, 0.125)
    text = _artifact("level-2026-03-03-night")
    assert "level-2026-03-03 was promoted: test/level 2 against 1: better by 1, more than the margin of 0.125" in text
    assert "| test/level | 2 | 1 |" in text

    assert _states(house, "level nightly 2026-03-04") == [
        ("Kept", "nothing new to train on; level-2026-03-03 stays champion")
    ]
    [(name, message), *_] = _states(house, "level nightly 2026-03-03")
    assert (name, message) == ("Promoted", third.verdict)
    [(name, message)] = _states(house, "level nightly 2026-03-02")
    assert (name, message.startswith("FileNotFoundError: ")) == ("Failed", True), message

    back = Command(["champion", "rollback", f"{tmp_path}/runs"], environment, tmp_path / "back.txt")
    assert back.code() == 0, back.output
    assert house.reigning() == (3, "level-2026-03-01")
    [rolled] = wait_for(lambda: _told(server, house, "rolled_back", 1), "an event for the roll-back")
    assert (rolled.run, rolled.after) == ("level-2026-03-01", third.run)
    assert Path(rolled.weights, "manifest.json").exists()
    assert (tmp_path / "champions").read_text() == "level-2026-03-03 True\nlevel-2026-03-01 True\n"


def test_a_promotion_that_was_taken_back_is_not_told_again(house: House, server: str, tmp_path: Path) -> None:
    for day, level in ((1, 1.0), (2, 2.0)):
        house.comes_in(day, level)
        _night(house, day)
    ModelRegistry.of(house.job()).roll_back()
    (tmp_path / "runs" / "level-2026-03-02" / "decision.json").unlink()  # as if killed after it was promoted

    again = _night(house, 2)
    assert again.verdict.endswith("more than the margin of 0.125. By now level-2026-03-01 is champion")
    shown = StringIO()
    show_nightly_report(Console(file=shown), again)
    assert "champion rollback" not in shown.getvalue(), "it would end the champion that is in charge"

    house.comes_in(3, 3.0)
    assert _night(house, 3).verdict.endswith("more than the margin of 0.125")
    promoted = wait_for(lambda: _told(server, house, "promoted", 3), "an event for each promotion, and no more")
    assert [one.run for one in promoted] == ["level-2026-03-01", "level-2026-03-02", "level-2026-03-03"]


#: a script that learns the level of the day's data in one step, and logs it with its weights
SCRIPT = """
import sys
from pathlib import Path
import torch
from midstride.engine import Loop

loop = Loop()
level = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(level.weight)
loop.keep(level=level, optimizer=(optimizer := torch.optim.SGD(level.parameters(), lr=0.5)))
target = float(Path(f"incoming/{sys.argv[1]}.txt").read_text())
for _ in loop.steps(3):
    (level(torch.ones(1)) - target).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    loop.log("val/level", level.weight.item())
    loop.save_weights("best")
"""
SCRIPT_JOB = """
name: level
script: train.py
args: ["{date}"]
world: {accelerator: cpu}
trainer: {enable_progress_bar: false}
snapshots: {url: runs, every_steps: 1}
monitor: {metric: val/level, mode: max}
nightly: {margin: 0.125}
"""


@pytest.mark.usefixtures("server")
def test_nights_of_a_script_compare_what_it_logged(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(SCRIPT_JOB)
    for day, level in ((1, 1.0), (2, 0.5), (3, 2.0)):
        house.comes_in(day, level)

    first = nightly(house.job(), house.date(1))
    assert first.champion == "level-2026-03-01"
    worse = nightly(house.job(), house.date(2))
    assert "val/level 0.5 against 1" in worse.verdict
    assert house.reigning() == (1, "level-2026-03-01")

    plan = FaultPlan(tmp_path / "plan").add("kill", rank=0, step=2, phase="fetch")
    with monkeypatch.context() as patch:
        patch.setenv(*next(iter(plan.environment.items())))
        third = nightly(house.job(), house.date(3))
    plan.assert_all_fired()
    assert house.attempts(3) == ["died", "done"]
    assert "val/level 2 against 1: better by 1, more than the margin of 0.125" in third.verdict
    assert house.reigning() == (2, "level-2026-03-03")
    assert weights_at(third.weights).state_dict["level.weight"].item() == 2.0
    assert nightly(house.job(), house.date(3)) == third, "the same night again changes nothing"
    assert house.attempts(3) == ["died", "done"], "and trains nothing"


def test_the_example_promotes_a_night_that_is_better(server: str, tmp_path: Path) -> None:
    """That of docs/examples/nightly; a gate that nothing passes keeps the champion."""
    source = Path(__file__).parents[2] / "docs/examples/nightly"
    folder = shutil.copytree(source, tmp_path / "nightly", ignore=shutil.ignore_patterns(".cache", "runs"))
    job = TrainingJob.load(folder / "job.yaml", ["trainer.max_epochs=1"])
    assert nightly(job, "2026-03-01").champion == "demand-2026-03-01"
    strict = TrainingJob.load(folder / "job.yaml", ["trainer.max_epochs=1", "nightly.margin=100"])
    second = nightly(strict, "2026-03-02")
    assert second.champion == "demand-2026-03-01", second.verdict
    assert {path.name for path in (folder / ".cache").iterdir()} == {"2026-03-01", "2026-03-02"}


def _told(server: str, house: House, what: str, count: int) -> list[Any]:
    """Return what `count` events about the champions of this house say, oldest first; none if there are fewer."""
    found = [payload(one) for one in reversed(told(server, "midstride.model.level", f"midstride.model.{what}"))]
    ours = [one for one in found if one.model_dump()["weights"].startswith(str(house.folder))]
    return ours if len(ours) == count else []


def _states(house: House, flow_run: str) -> list[tuple[str, str]]:
    """Return the states of the flow runs of that name; those of another test have another folder."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[flow_run])))
    ours = [run for run in runs if str(house.folder) in str(run.parameters)]
    return [(str(run.state_name), str(run.state.message)) for run in ours]


def _artifact(key: str) -> str:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return str(found[0].data)  # each time the night is asked for it is shown again


@pytest.mark.parametrize(
    ("flow", "cron", "warned"),
    [
        *(("nightly", cron, 1) for cron in ("0 2,14 * * *", "*/5 2 * * *", "@hourly")),
        *(("nightly", cron, 0) for cron in ("0 2 * * 1-5", "@daily")),
        ("train", "0 2,14 * * *", 0),
    ],
)
def test_a_schedule_of_several_nights_in_a_day_is_told_of(
    house: House, server: str, capfd: pytest.CaptureFixture[str], flow: str, cron: str, warned: int
) -> None:
    """On the terminal: the commands do not show Prefect's log."""
    create_pool("nights")
    deploy(house.job(), "often", pool="nights", flow=flow, cron=cron)
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == [f"--cron '{cron}'"] * warned
