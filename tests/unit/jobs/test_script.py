"""The script of a job: what its Loop takes from the job, how it ends, and what `check` says of it."""

import sys
from pathlib import Path

import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, UserError
from midstride.engine.jobs.build import build_module
from midstride.engine.jobs.check import job_errors
from midstride.engine.jobs.evaluate import evaluate_with_champion
from midstride.engine.jobs.script import run_script
from midstride.engine.loop.script_job import ScriptJob
from midstride.engine.runs.run import Run
from midstride.engine.storage.store import Store

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from midstride.engine import Loop

print(*sys.argv[1:])
loop = Loop({arguments})
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop.keep(model=model, optimizer=optimizer)
train = loop.loader(DataLoader(torch.arange(8.0).reshape(8, 1) / 8, 2, shuffle=True))
for epoch in loop.epochs(2):
    for x in train:
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log("loss", loss)
    loop.log("val/loss", loss.item())
    loop.save_weights("best")
"""
MONITOR = "monitor: {metric: val/loss}\n"


def make_job(folder: Path, script: str, text: str = "") -> TrainingJob:
    (folder / "train.py").write_text(script)
    (folder / "job.yaml").write_text(f"name: own\nscript: train.py\nworld: {{accelerator: cpu}}\nseed: 3\n{text}")
    return TrainingJob.load(folder / "job.yaml")


def run(job: TrainingJob, name: str) -> Store:
    script = ScriptJob(job, job.run_url(name))
    try:
        run_script(script)
    finally:
        script.close()
    return Store.open(job.run_url(name))


def test_a_loop_takes_the_choices_of_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path, SCRIPT.format(arguments=""), f"args: [a, 7]\n{MONITOR}snapshots: {{every_steps: 3}}")
    before = [*sys.argv], [*sys.path]
    store = run(job, "first")
    assert (sys.argv, sys.path) == before
    assert capsys.readouterr().out == "a 7\n"
    assert len(store.read("metrics.csv").splitlines()) == 1 + 8
    compared = evaluate_with_champion(Run(job, "first"))
    assert (compared["weights"], compared["champion"]) == ("best", None)
    assert set(compared["challenger"]) >= {"val/loss"}
    warm = job.model_copy(update={"weights": f"{store.url}/best"})
    last = run(warm, "warm").read("metrics.csv").decode().splitlines()[1]
    assert last not in store.read("metrics.csv").decode().splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("seed=7", "Loop has seed 7, and the job has seed: 3"),
        ("'runs/own'", "Loop has run .*/runs/own', and its run is .*/runs/first'"),
        (
            "snapshots={'every_steps': 4}",
            "Loop has snapshots every_steps 4, and the job has snapshots.every_steps: None",
        ),
    ],
)
def test_a_disagreement_shows_both_values(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=words):
        run(make_job(tmp_path, SCRIPT.format(arguments=arguments)), "first")


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("import sys; sys.exit(2)", UserError, "exit code 2"),
        ("import sys; sys.exit('no GPU')", EngineError, "no GPU"),
        ("print(1)", UserError, "ended before a loop"),
        ("nonsense(1)", UserError, "NameError"),
        ("if", UserError, "SyntaxError"),
        (SCRIPT.format(arguments="") + "Loop()", UserError, "second Loop"),
    ],
)
def test_a_script_that_does_not_train_is_an_error(script: str, kind: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=words):
        run(make_job(tmp_path, script), "first")


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path, "").model_copy(update={"script": "trian.py"})
    with pytest.raises(JobError, match=r"trian.py: No such file or directory; its folder has train.py"):
        run(job, "first")
    with pytest.raises(JobError, match="needs a module"):
        build_module(job)


def test_check_tries_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job_errors(make_job(tmp_path, SCRIPT.format(arguments=""))) == []
    broken = make_job(tmp_path, SCRIPT.format(arguments="").replace("optimizer.step()", "optimizer.stop()"))
    [fault] = job_errors(broken)
    assert "no attribute 'stop'" in fault
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert capsys.readouterr().out
