"""The examples of the docs: each trains on a CPU in seconds, without a download, and learns."""

import csv
import os
import shutil
from pathlib import Path

import pytest
from support.fork_server import run_program

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import VARIABLE, FaultPlan
from midstride.flows.cli import app

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
#: example -> the logged value that falls, and what to set for a short run
TRAINED = {
    "text": ("train/loss", ["trainer.max_epochs=1"]),
    "tabular": ("val/loss", ["trainer.max_epochs=2"]),
    "lightning": ("val_loss", ["trainer.max_epochs=2"]),
    "sharded": ("train/loss", ["trainer.max_epochs=1"]),
    "own_loop": ("train/loss", ["args=[--epochs, 2]"]),
}
#: examples that other tests train
ELSEWHERE = {
    "digits": "unit/test_digits.py",
    "huggingface": "laws/huggingface.py",
    "nightly": "flows/test_nightly.py",
    "sweep": "flows/test_sweep_example.py",
}


@pytest.fixture
def example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of an example, which is also the current folder."""
    folder = shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns(".cache", "runs"))
    monkeypatch.chdir(folder)
    return folder


def values(run: Path, name: str) -> list[float]:
    """Return the values of a name in the metric log, oldest first."""
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.usefixtures("forked_worlds")
def test_an_example_learns(name: str, example: Path) -> None:
    metric, choices = TRAINED[name]
    sets = [word for choice in choices for word in ("--set", choice)]
    assert app(["fit", "job.yaml", "--run", "first", *sets], result_action="return_value") == 0
    run = example / "runs" / "first"
    first, *_, last = values(run, metric)
    assert last < first
    assert [*(run / "best").glob("*/model*.safetensors")]
    assert not [path for path in example.rglob("*") if path.suffix == ".part"]


@pytest.mark.parametrize("name", [*TRAINED, *ELSEWHERE])
def test_an_example_is_complete(name: str, example: Path) -> None:
    job = TrainingJob.load(example / "job.yaml")
    assert job.world.accelerator == "cpu"
    assert (example / "README.md").exists()


def test_the_own_loop_learns_and_resumes(tmp_path: Path) -> None:
    script, log = EXAMPLES / "own_loop/train.py", tmp_path / "log.txt"
    plan = FaultPlan(tmp_path / "plan").add("kill", step=33, phase="after_step")
    environment = {**os.environ, VARIABLE: str(tmp_path / "plan")}
    assert run_program(script, log, "--run", str(tmp_path / "killed"), "--epochs", "2", environment=environment) == -9
    plan.assert_all_fired()
    for run in ("killed", "whole"):
        assert run_program(script, log, "--run", str(tmp_path / run), "--epochs", "2") == 0, log.read_text()
    first, last = values(tmp_path / "killed", "val/accuracy")
    assert last > first > 0.4
    assert (tmp_path / "killed/metrics.csv").read_bytes() == (tmp_path / "whole/metrics.csv").read_bytes()


def test_every_example_is_trained_by_a_test() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/job.yaml")} == {*TRAINED, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert f"docs/examples/{name}" in (EXAMPLES.parents[1] / "tests" / test).read_text()
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in (*TRAINED, *ELSEWHERE) if f"({name}/README.md)" not in listed] == []
