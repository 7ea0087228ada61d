"""`midstride fork | replay | verify | diff`: runs that start from a snapshot of another run."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.flow_runs import TINY, results, tiny_job, train_forked

from midstride.engine.cli.replay import launch_quietly
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.world import WorldOptions
from midstride.engine.launch.launch import launch
from midstride.engine.processes.process_identity import process_identity
from midstride.engine.runs.forked_job import as_forked
from midstride.engine.runs.recomputed_states import state_difference
from midstride.engine.runs.run import Run, job_of, run_at
from midstride.engine.runs.run_report import metric_rows, report_of
from midstride.engine.snapshots.catalog import MANIFEST, SnapshotCatalog
from midstride.engine.snapshots.holder import held
from midstride.engine.snapshots.lease import acquire
from midstride.engine.storage.checksums import encode_document
from midstride.engine.storage.store import Store
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


def test_a_fork_is_a_run_of_its_own(trained: TrainingJob, said: Callable[..., Any]) -> None:
    runs = trained.store_url
    code, text = said("fork", f"{runs}/a", "--step", "20", "--run", "b")
    assert code == 0
    assert f"{runs}/b is a fork of {runs}/a, step 20; nothing was copied" in text
    assert text.endswith("train it: midstride fit JOB --run b\n")
    (_, new) = said("runs", runs, "--json")
    states = {one["name"]: (one["state"], one["step"], one["parent"]) for one in json.loads(new)}
    assert states == {"a": ("done", 24, ""), "b": ("new", 20, "a, step 20")}
    assert said("fork", f"{runs}/a", "--step", "24", "--run", "ended")[0] == 0
    assert (report_of(Run(trained, "ended")).outcome, report_of(Run(trained, "ended")).why) == ("new", "")
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
    assert text.endswith("train it: midstride fit JOB --run c\n")
    job = job_of(Run(trained, "c").store)
    assert job is not None
    assert (job.trainer.max_steps, job.accept_change) == (30, ("module_args", "settings"))
    assert report_of(Run(trained, "c")).settings == changes
    assert (as_forked(Run(trained, "c")).job.trainer, as_forked(Run(job, "c")).job) == (job.trainer, job)
    train_forked(as_forked(Run(trained, "c")).job, "c")
    longer = trained.model_copy(update={"trainer": trained.trainer.model_copy(update={"max_steps": 31})})
    again = as_forked(Run(longer, "c")).job
    assert (again.trainer.max_steps, again.module_args, again.accept_change) == (31, job.module_args, ())
    assert said("fork", f"{runs}/c", "--step", "30", "--run", "d", "--set", "module_args.mark=./third")[0] == 0
    grandchild = as_forked(Run(trained, "d")).job
    assert (grandchild.trainer.max_steps, grandchild.module_args["mark"]) == (30, str(Path.cwd() / "third"))


@pytest.mark.parametrize(
    ("given", "accepted"), [((), {"module_args", "settings"}), (("--optimizer-from", "snapshot"), {"module_args"})]
)
def test_options_of_optimizers(
    given: tuple[str, ...], accepted: set[str], trained: TrainingJob, said: Callable[..., Any], tmp_path: Path
) -> None:
    new = f"{tmp_path}/new"
    said("fork", f"{trained.store_url}/a", "--run", new, "--set", "module_args.mark=./other", *given)
    job = job_of(Store.open(new))
    assert job is not None
    assert {*job.accept_change} == accepted


def test_a_parent_that_is_no_run_is_named(trained: TrainingJob, said: Callable[..., Any], tmp_path: Path) -> None:
    code, text = said("fork", f"{tmp_path}/none", "--run", "b")
    assert (code, f"there is no run 'none' in {tmp_path}" in text) == (2, True), text
    code, text = said("fork", trained.store_url, "--run", "b")
    assert (code, f"name one of them, such as {trained.store_url}/a" in text) == (2, True), text


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
    assert ("█" * 12 in text, "loss in eval mode" in text) == (True, True), text
    assert (tmp_path / "probe.txt").read_text() == "22 (4, 8) True"
    assert state_of(Path(trained.store_url, "a")) == before
    code, text = said("replay", f"{trained.store_url}/a", "--step", "2", "--from-start", "--json")
    found = json.loads(text)
    assert (code, found["first"], found["last"], found["compared"], found["difference"]) == (0, 1, 2, 2, None)
    page = found["page"]
    assert [*page["layers"]] == ["net.0", "net.3"]
    assert [one["step"] for one in page["steps"]] == [1, 2]
    assert page["steps"][-1]["losses"] == page["losses"]
    norms = [one["gradient"] for one in page["layers"].values()]
    assert math.isclose(page["steps"][-1]["gradient"], math.hypot(*norms), rel_tol=1e-5)
    losses = [one["loss"] for one in page["largest"]]
    assert losses == sorted(losses, reverse=True)
    assert {(one["sample"], one["rank"]) for one in page["largest"]} == {
        (number, 0) for number in page["samples"][0][0]
    }


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
    found = json.loads(said("replay", f"{runs}/f", "--step", "21", "--json")[1])
    assert len(found["page"]["largest"]) == 4  # computed at that step


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
    logged = [{"logged": {"rows": {"open": {"train/loss": loss}}}} for loss in (0.5, 0.7)]
    assert "the logged metric 'train/loss': " in str(state_difference(*logged, 24, 0))
    timed = [{"kept trainer": {"state": {"log_history": [{"train_runtime": took_s}]}}} for took_s in (0.5, 0.7)]
    assert state_difference(*timed, 24, 0) is None


def test_damaged_snapshots_are_named(trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]) -> None:
    runs = shutil.copytree(trained.store_url, tmp_path / "runs")
    damaged(lambda data: data[:-1])(runs / "a")
    code, text = said("verify", f"{runs}/a", "--from", "20")
    assert (code, "snapshot 000000000020-g000001 is damaged: " in text) == (1, True), text
    assert "No other step to start from is kept: keep more with snapshots.keep" in text
    code, text = said("diff", f"{trained.store_url}/a", f"{runs}/a")
    assert (code, "every common snapshot that is whole\nnot compared " in text) == (0, True), text


def test_a_run_on_s3(trained: TrainingJob, bucket: str, said: Callable[..., Any]) -> None:
    assert trained.snapshots is not None
    job = trained.model_copy(update={"snapshots": trained.snapshots.model_copy(update={"url": f"{bucket}/runs"})})
    Run(job, "a").save_job()
    train_forked(job, "a")
    store = Store.open(job.run_url("a"))
    before = {path: store.read(path) for path in store.find()}
    code, text = said("verify", store.url, "--from", "20")
    assert (code, "the whole state is equal at step 24" in text) == (0, True), text
    assert said("fork", store.url, "--step", "20", "--run", "b")[0] == 0
    train_forked(job, "b")
    code, text = said("diff", store.url, job.run_url("b"))
    assert (code, text) == (0, "equal: every row of the metric log and every common snapshot\n")
    code, text = said("replay", job.run_url("b"), "--step", "23")
    assert (code, "all rows equal" in text) == (0, True), text
    assert {path: store.read(path) for path in store.find()} == before


@pytest.mark.parametrize("removed", [20, 24])
def test_a_run_that_removes_a_snapshot_meanwhile_is_not_damaged(
    trained: TrainingJob, tmp_path: Path, said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    run = shutil.copytree(Path(trained.store_url, "a"), tmp_path / "a")
    kept = SnapshotCatalog(Store.open(str(run))).snapshots()

    def prune() -> None:
        for snapshot in kept:
            if snapshot.position.step == removed:
                shutil.rmtree(run / snapshot.path)

    def pruning(*arguments: Any) -> Callable[[Run], Any]:
        def start(fork: Run) -> Any:
            if removed == 20:
                prune()
            outcome = launch_quietly(*arguments)(fork)
            if removed != 20:
                prune()
            return outcome

        return start

    monkeypatch.setattr("midstride.engine.cli.verify.launch_quietly", pruning)
    code, text = said("verify", str(run), "--from", "20")
    assert (code, f"has removed its snapshot of step {removed} before it was compared" in text) == (1, True), text
    assert ("damaged" in text, "missing" in text) == (False, False), text


@pytest.mark.parametrize("command", ["diff", "compare"])
def test_of_two_runs_the_one_that_cannot_be_read_is_named(
    trained: TrainingJob, tmp_path: Path, said: Callable[..., Any], command: str
) -> None:
    copy = shutil.copytree(Path(trained.store_url, "a"), tmp_path / "copy")
    (copy / "job.json").unlink()
    (copy / "job.json").mkdir()  # root can read any file
    for urls in ((f"{trained.store_url}/a", str(copy)), (str(copy), f"{trained.store_url}/a")):
        code, text = said(command, *urls)
        assert (code, text.startswith(f"{copy} cannot be read: [Errno 21] Is a directory")) == (2, True), text


def test_a_lost_lease_is_named_by_diff(trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]) -> None:
    copy = shutil.copytree(Path(trained.store_url, "a"), tmp_path / "copy")
    shutil.rmtree(copy / "lease")
    code, text = said("diff", f"{trained.store_url}/a", str(copy))
    assert (code, f"{copy}/lease/000001.json is missing" in text) == (1, True), text


def test_a_run_that_cannot_be_audited_hides_no_other(
    trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]
) -> None:
    shutil.copytree(Path(trained.store_url, "a"), tmp_path / "a")
    (tmp_path / "dead" / "lease").mkdir(parents=True)
    code, text = said("audit", str(tmp_path))
    assert (code, "each sample was used once" in text) == (1, True), text
    assert f"{tmp_path}/dead has no snapshot: samples can be audited" in text


def test_two_runs_that_differ(trained: TrainingJob, said: Callable[..., Any]) -> None:
    runs = trained.store_url
    assert said("diff", f"{runs}/a", f"{runs}/a") == (
        0,
        "equal: every row of the metric log and every common snapshot\n",
    )
    said("fork", f"{runs}/a", "--step", "20", "--run", "longer", "--set", "trainer.max_steps=28")
    job = job_of(Run(trained, "longer").store)
    assert job is not None
    train_forked(job, "longer")
    code, text = said("diff", f"{runs}/longer", f"{runs}/a")
    assert code == 0, text
    assert text.startswith("equal up to step 24: "), text
    assert text.endswith(f"; {runs}/longer continues to step 28\n"), text
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


def test_snapshots_that_are_divided_otherwise_are_not_compared(
    trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]
) -> None:
    copy = shutil.copytree(Path(trained.store_url, "a"), tmp_path / "copy")
    recorded("identity", strategy="sharded")(copy)
    code, text = said("diff", f"{trained.store_url}/a", str(copy))
    assert (code, text.startswith("equal: every row of the metric log\n")) == (0, True), text
    assert "not compared      one trained under single with 1 rank, the other under sharded with 1 rank: " in text


def recorded(fact: str = "bits", **changes: Any) -> Callable[[Path], object]:
    """Return a function that changes a fact that the snapshots of a run have recorded, such as its environment."""

    def change(run: Path) -> None:
        store = Store.open(str(run))
        for name in store.list("snapshots"):
            path = f"snapshots/{name}/{MANIFEST}"
            manifest = json.loads(store.read(path))
            del manifest["checksum"]
            manifest["facts"][fact] |= changes
            store.write(path, encode_document(manifest))

    return change


def with_job(**changes: Any) -> Callable[[Path], object]:
    """Return a function that changes the job of a run."""

    def change(run: Path) -> None:
        Run(run_at(str(run)).job.model_copy(update=changes), run.name).save_job()

    return change


def two_ranks(run: Path) -> None:
    with_job(world=WorldOptions.model_validate({"strategy": "ddp", "processes": 2}))(run)


def no_data(run: Path) -> None:
    with_job(data="model:Gone")(run)
    code = run.parents[1] / "code"
    shutil.copytree(TINY, code)
    with (code / "model.py").open("a") as file:
        file.write("\n\nclass Gone(Data):\n    def setup(self, stage):\n        open('/gone/train.bin')\n")
    with_job(folder=str(code))(run)


def in_writing(run: Path) -> None:
    """Leave the run as another process does that is writing a snapshot."""
    store = Store.open(str(run))
    LIVE.enter_context(held(acquire(store, SnapshotCatalog(store).newest_name(), process_identity())))
    store.write("snapshots/000000000025-g000002/rank-00000-of-00001.json", b"{")


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Return a function that changes the newest tensors from which step 22 can be computed."""

    def act(run: Path) -> None:
        file = next((run / "snapshots").glob("000000000020-*/*.safetensors"))
        file.write_bytes(change(file.read_bytes()))

    return act


LIVE = ExitStack()

#: what is wrong -> (how it came to be, arguments, words of the answer; the last ones are of a replay with --anyway)
BAD: dict[str, tuple[Callable[[Path], object] | None, tuple[str, ...], tuple[str, ...]]] = {
    "a step beyond the end": (None, ("--step", "25"), ("has no step 25: it has steps 1 to 24",)),
    "step 0": (None, ("--step", "0"), ("has no step 0",)),
    "a pruned snapshot": (
        None,
        ("--step", "2"),
        ("no snapshot before step 2 (first: ", "--from-start computes 2 steps"),
    ),
    "no probe": (None, ("--step", "22", "--probe", "nothing.py:x"), ("there is no such file",)),
    "another library": (recorded(torch="1.13"), ("--step", "22"), ("torch was 1.13, and is ", "--anyway")),
    "another Python": (recorded(python="3.8.1"), ("--step", "22"), ("python was 3.8.1", "--anyway")),
    "another device": (recorded(gpu="NVIDIA H200"), ("--step", "22"), ("gpu was NVIDIA H200, and is None",)),
    "other code": (recorded(source={"model": "0"}), ("--step", "22"), ("model has changed", "--anyway")),
    "with other code anyway": (recorded(source={"model": "0"}), ("--step", "22", "--anyway"), ("all rows equal",)),
    "another number of ranks": (two_ranks, ("--step", "22"), ("taken by 1 ranks, and the job has 2",)),
    "data that are gone": (no_data, ("--step", "22", "--anyway"), ("No such file or directory: '/gone/train.bin'",)),
    "a snapshot with another byte": (
        damaged(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("--step", "22"),
        ("before step 22 is whole. --from-start computes 22 steps", "snapshot 000000000020-g000001 is damaged: "),
    ),
    "a snapshot that was cut off": (
        damaged(lambda data: data[:-1]),
        ("--step", "22"),
        ("before step 22 is whole. --from-start computes 22 steps", "snapshot 000000000020-g000001 is damaged: "),
    ),
    "a run that is being written": (in_writing, ("--step", "22"), ("all rows equal",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, trained: TrainingJob, tmp_path: Path, said: Callable[..., Any]) -> None:
    act, arguments, words = BAD[case]
    run = Path(trained.store_url, "a")
    if act is not None:
        run = Path(shutil.copytree(run, tmp_path / "runs" / "a"))
        act(run)
    before = state_of(run)
    with LIVE:
        code, text = said("replay", str(run), *arguments)
    assert (code == 0) == ("all rows equal" in words), text
    for word in words:
        assert word in " ".join(text.split()), text
    assert state_of(run) == before


#: arguments -> message
REFUSED = {
    ("--step", "99", "--run", "x"): "its newest one is of step 24",
    ("--run", "x", "--set", "trainer.nonsense=1"): "nonsense",
    ("--run", "no good"): "letters, digits",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_refused(arguments: tuple[str, ...], trained: TrainingJob, said: Callable[..., Any]) -> None:
    code, text = said("fork", f"{trained.store_url}/a", *arguments)
    assert code
    assert REFUSED[arguments] in text
    assert not Path(trained.store_url, "x").exists()
