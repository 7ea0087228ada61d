"""The script of a job: what its Loop takes from the job, how it ends, and what `check` says of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import EngineError, JobError, ReplayEnd, UserError
from midstride.engine.jobs.build import build_module
from midstride.engine.jobs.check import job_errors
from midstride.engine.jobs.evaluate import evaluate, evaluate_with_champion
from midstride.engine.jobs.script import run_script
from midstride.engine.launch.launch import launch
from midstride.engine.loop.script_job import ScriptJob
from midstride.engine.runs.forked_job import as_forked
from midstride.engine.runs.replay import quiet_copy, replay_environment
from midstride.engine.runs.run import Run
from midstride.engine.session.replay_plan import RESULT, ReplayPlan
from midstride.engine.snapshots.reader import weights_at
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


def make_job(folder: Path, script: str, text: str = "", processes: int = 1) -> TrainingJob:
    (folder / "train.py").write_text(script)
    world = f"world: {{accelerator: cpu, processes: {processes}}}"
    (folder / "job.yaml").write_text(f"name: own\nscript: train.py\n{world}\nseed: 3\n{text}")
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


def test_a_script_that_names_run_snapshots_and_tracker_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "'runs/first', snapshots={'every_steps': 4}, loggers=['tensorboard']"
    job = make_job(tmp_path, SCRIPT.format(arguments=arguments))
    copy = quiet_copy(job.model_copy(update={"snapshots": SnapshotOptions()}), "first", str(tmp_path / "copy"))
    with replay_environment(ReplayPlan(str(tmp_path), 3)), pytest.raises(ReplayEnd):
        run(copy.job, copy.name)
    assert json.loads((tmp_path / RESULT).read_text())["page"]["step"] == 3
    assert [*tmp_path.rglob("events.out*")] == []


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


def test_an_error_in_a_loop_names_its_replay(tmp_path: Path) -> None:
    script = SCRIPT.format(arguments="").replace("loss.backward()", "loss.backward() if epoch == 0 else no_such_thing")
    with pytest.raises(NameError) as raised:
        run(make_job(tmp_path, script), "first")
    assert raised.value.__notes__ == [f"look into it:  midstride replay {tmp_path}/runs/first --step 5"]


def test_a_script_is_tested_by_what_it_logged(tmp_path: Path, said: Callable[..., tuple[object, str]]) -> None:
    job = make_job(tmp_path, SCRIPT.format(arguments=""), MONITOR)
    store = run(job, "first")
    Run(job, "first").save_job()
    logged = evaluate(Run(job, "first"))
    assert logged == dict(weights_at(f"{store.url}/best").facts["metrics"])
    assert "val/loss" in logged
    with pytest.raises(UserError, match=r"train.py has logged nothing with .*/snapshots/"):
        evaluate(Run(job, "first"), step=8)
    for words, expected, told in (
        (["test", store.url], 0, "as train.py logged them"),
        (["test", store.url, "--set", "args=[b]"], 2, "train.py tests its weights itself"),
    ):
        code, text = said(*words)
        assert (code, told in " ".join(text.split())) == (expected, True)


def test_commands_name_the_loop_of_a_script(tmp_path: Path, said: Callable[..., tuple[object, str]]) -> None:
    store = run(make_job(tmp_path, SCRIPT.format(arguments="")), "first")
    for words, code, told in (
        (("fork", store.url, "--run", "second"), 0, 'train it: Loop("'),
        (("report", store.url), 0, "script first: done"),
        (("diff", store.url, store.url), 0, "equal: every row"),
        (("audit", store.url), 0, "each sample was used once"),
        (("replay", store.url, "--step", "3"), 2, "Train it by a job with script: train.py"),
        (("verify", store.url), 2, "Train it by a job with script: train.py"),
    ):
        ended, printed = said(*words)
        assert (ended, told in printed) == (code, True), printed


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


@pytest.mark.usefixtures("forked_worlds")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_is_replayed_verified_and_forked(
    processes: int, tmp_path: Path, said: Callable[..., tuple[object, str]]
) -> None:
    text = "snapshots: {every_steps: 1, keep: 9}\nresources: {}\n"
    script = SCRIPT.format(arguments="").replace("= torch.nn.Linear(1, 1)", "= loop.ddp(torch.nn.Linear(1, 1))")
    job = make_job(tmp_path, script, text, processes)
    outcome = launch(Run(job, "a"))
    assert outcome.kind == "done", outcome
    url = job.run_url("a")
    steps = 4 if processes == 2 else 8
    code, printed = said("replay", url, "--step", str(steps - 1))
    assert (code, "all rows equal" in printed, "\n  loss  " in printed) == (0, True, True), printed
    code, printed = said("verify", url, "--from", "1")
    assert (code, "the whole state is equal at step" in printed) == (0, True), printed
    assert said("fork", url, "--step", "3", "--run", "b")[0] == 0
    assert launch(as_forked(Run(job, "b"))).kind == "done"
    assert said("diff", url, job.run_url("b")) == (0, "equal: every row of the metric log and every common snapshot\n")
    (tmp_path / "other").mkdir()
    other = make_job(tmp_path / "other", script.replace("lr=0.1", "lr=0.2"), text, processes)
    assert launch(Run(other, "c")).kind == "done"
    code, printed = said("diff", url, other.run_url("c"))
    first = "first difference  step 0, rank 0, optimizer state: SGD, group 0: lr (0.1, and 0.2)"
    assert (code, first in printed) == (1, True), printed
    tensors = next(Path(url, "snapshots").glob("000000000003-*/*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    code, printed = said("replay", url, "--step", "4")
    assert f"replayed steps {2 if processes == 2 else 3} to 4 of" in printed, printed
    assert (code, f"snapshot {tensors.parent.name} is damaged: {tensors} has " in printed) == (0, True), printed
    code, printed = said("replay", url, "--step", "3", "--anomaly")
    assert (code, "a script computes its own steps" in printed) == (1, True), printed
