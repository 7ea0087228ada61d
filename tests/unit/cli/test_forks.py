"""`midstride fork | replay | verify | diff`: runs that start from a snapshot of another run."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.flow_runs import results, tiny_job, train_forked

from midstride.engine.cli.app import main
from midstride.engine.config.job import TrainingJob
from midstride.engine.launch.launch import launch
from midstride.engine.runs.recomputed_states import state_difference
from midstride.engine.runs.run import Run, job_of
from midstride.engine.runs.run_report import metric_rows, report_of
from midstride.engine.testing import final_state

pytestmark = pytest.mark.usefixtures("forked_worlds")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """Return a job with a run `a`, whose snapshots are of steps 5, 10, 12, ... and 24."""
    job = tiny_job(tmp_path_factory.mktemp("fork"), processes=1)
    Run(job, "a").save_job()
    train_forked(job, "a")
    return job


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and content of every file in `folder`, and the times of its folders."""
    found = sorted([folder, *folder.rglob("*")])
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


def results_at(job: TrainingJob, run: str) -> dict[str, Any]:
    """Return the state of rank 0 at the end of a run."""
    state: dict[str, Any] = final_state(job.run_url(run))[0]
    return state


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs a command and returns what it prints, and its exit code."""

    def call(*arguments: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments=arguments)
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    return call


def test_a_fork_is_a_run_of_its_own(trained: TrainingJob, said: Callable[..., Any]) -> None:
    runs = trained.store_url
    code, text = said("fork", f"{runs}/a", "--step", "20", "--run", "b")
    assert code == 0
    assert f"{runs}/b is a fork of {runs}/a, step 20; nothing was copied" in text
    assert text.endswith("train it: midstride fit JOB --run b\n")
    (_, new) = said("runs", runs, "--json")
    states = {one["name"]: (one["state"], one["step"], one["parent"]) for one in json.loads(new)}
    assert states == {"a": ("done", 24, ""), "b": ("new", 20, "a, step 20")}
    train_forked(trained, "b")
    assert results(trained, "b") == results(trained, "a")
    assert report_of(Run(trained, "b")).parent == "a, step 20"
    assert "fork of" in said("report", f"{runs}/b")[1]
    assert "(fork of a, step 20)" in said("audit", f"{runs}/b")[1]
    kept = said("snapshots", "prune", f"{runs}/a", "--keep", "1")[1]
    assert f"000000000020-g000001 stays: {runs}/b starts from it" in kept


def test_changes_are_in_the_command_and_in_the_report(trained: TrainingJob, said: Callable[..., Any]) -> None:
    runs, changes = trained.store_url, ("trainer.max_steps=30", "module_args.mark=./other")
    sets = [word for change in changes for word in ("--set", change)]
    code, text = said("fork", f"{runs}/a", "--run", "c", *sets)
    assert code == 0
    command = shlex.split(text.rpartition("train it: ")[2])
    assert command[4:] == ["c", *sets, "--accept-change", "module_args", "--accept-change", "settings"]
    job = job_of(Run(trained, "c").store)
    assert job is not None
    assert (job.trainer.max_steps, job.accept_change) == (30, ("module_args", "settings"))
    assert report_of(Run(trained, "c")).settings == changes


# --- replay ---------------------------------------------------------------------------------------------------------


PROBE = """
from pathlib import Path

def look(trainer, module, batch):
    Path(__file__).with_suffix(".txt").write_text(f"{trainer.global_step} {tuple(batch[0].shape)} {module.training}")

def nudge(trainer, module, batch):
    module.net[3].weight.data += 1

def poison(trainer, module, batch):
    module.net[3].weight.data[0, 0] = float("nan")
"""


def test_a_replayed_step_equals_the_run(trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    before = state_of(Path(trained.store_url, "a"))
    code, text = said("replay", f"{trained.store_url}/a", "--step", "23", "--probe", f"{tmp_path}/probe.py:look")
    assert (code, "replayed steps 21 to 23" in text, "all rows equal" in text) == (0, True, True), text
    assert "step 23: epoch 0, batch 22" in text
    assert "Adam, group 0  0.01" in text
    assert (tmp_path / "probe.txt").read_text() == "22 (4, 8) True"
    assert state_of(Path(trained.store_url, "a")) == before
    code, text = said("replay", f"{trained.store_url}/a", "--step", "2", "--from-start", "--json")
    found = json.loads(text)
    assert (code, found["first"], found["last"], found["compared"], found["difference"]) == (0, 1, 2, 2, None)
    assert [*found["page"]["layers"]] == ["net.0", "net.3"]


def test_a_step_that_differs_is_named(trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    code, text = said("replay", f"{trained.store_url}/a", "--step", "23", "--probe", f"{tmp_path}/probe.py:nudge")
    expected = metric_rows(Run(trained, "a").store)[22]["train/loss"]
    assert (code, f"First at step 23, train/loss: {expected} in the run, " in text) == (1, True), text


def test_the_first_value_that_is_not_finite(trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    arguments = ("replay", f"{trained.store_url}/a", "--step", "22", "--probe", f"{tmp_path}/probe.py:poison")
    code, text = said(*arguments, "--anomaly")
    assert code == 1
    assert "nan in the output of net.3 (Linear); its input is finite, its weight is not" in text
    assert "loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])" in text


def test_an_error_in_a_step_ends_with_the_command(trained: TrainingJob, said: Callable[..., Any]) -> None:
    runs = trained.store_url
    said("fork", f"{runs}/a", "--step", "20", "--run", "f", "--set", "module_args.fail_at=21")
    job = job_of(Run(trained, "f").store)
    assert job is not None
    outcome = launch(Run(job, "f"))
    assert outcome.error.splitlines()[-1] == f"look into it:  midstride replay {runs}/f --step 22"
    code, text = said("replay", f"{runs}/f", "--step", "22")
    assert (code, "the model is not in the mood" in text) == (1, True)


# --- verify and diff ------------------------------------------------------------------------------------------------


def test_a_run_is_computed_again(trained: TrainingJob, said: Callable[..., Any]) -> None:
    before = state_of(Path(trained.store_url, "a"))
    code, text = said("verify", f"{trained.store_url}/a", "--from", "20", "--json")
    found = json.loads(text)
    assert (code, found["start"], found["equal"][-1], found["difference"]) == (0, 20, 24, None), text
    assert state_of(Path(trained.store_url, "a")) == before
    state = results_at(trained, "a")
    weights = state["module"].copy()
    weights["net.0.bias"] = weights["net.0.bias"] + 1
    difference = state_difference(state, {**state, "module": weights}, 24, 0)
    assert str(difference).startswith("step 24, rank 0, module/net.0.bias: ")


def test_two_runs_that_differ(trained: TrainingJob, said: Callable[..., Any]) -> None:
    runs = trained.store_url
    assert said("diff", f"{runs}/a", f"{runs}/a") == (
        0,
        "equal: every row of the metric log and every common snapshot\n",
    )
    said("fork", f"{runs}/a", "--step", "20", "--run", "g", "--set", "data_args.folder=./other")
    job = job_of(Run(trained, "g").store)
    assert job is not None
    changed = job.model_copy(update={"trainer": job.trainer.model_copy(update={"gradient_clip_val": 1e-3})})
    accepting = changed.model_copy(update={"accept_change": (*job.accept_change, "gradient_clip_val")})
    Run(accepting, "g").save_job()
    train_forked(accepting, "g")
    code, text = said("diff", f"{runs}/a", f"{runs}/g")
    assert code == 1
    assert "first difference  step 21, rank 0, optimizer state: Adam: exp_avg of net.0.weight" in text, text
    assert "first row         step 22, train/loss: " in text
    assert "equal snapshots   up to step 20" in text
    assert "setting           trainer.gradient_clip_val: None, 0.001" in text


#: arguments -> message
REFUSED_REPLAYS = {
    ("--step", "25"): "has no step 25: it has steps 1 to 24",
    ("--step", "0"): "has no step 0",
    ("--step", "2"): "keeps no snapshot before step 2 (first: step",
    ("--step", "22", "--probe", "nothing.py:x"): "there is no such file",
}


@pytest.mark.parametrize("arguments", REFUSED_REPLAYS)
def test_refused_replays(arguments: tuple[str, ...], trained: TrainingJob, said: Callable[..., Any]) -> None:
    code, text = said("replay", f"{trained.store_url}/a", *arguments)
    assert code
    assert REFUSED_REPLAYS[arguments] in text


#: arguments -> message
REFUSED = {
    ("--step", "3", "--run", "x"): "keeps no snapshot of step 3",
    ("--step", "99", "--run", "x"): "its newest one is of step 24",
    ("--run", "a"): "exists already",
    ("--run", "x", "--set", "trainer.nonsense=1"): "nonsense",
    ("--run", "no good"): "letters, digits",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_refused(arguments: tuple[str, ...], trained: TrainingJob, said: Callable[..., Any]) -> None:
    code, text = said("fork", f"{trained.store_url}/a", *arguments)
    assert code
    assert REFUSED[arguments] in text
    assert not Path(trained.store_url, "x").exists()
