"""From a job to its callbacks, and their state through a death."""

import os
from pathlib import Path

import pytest

from midstride.engine import BestCheckpoint, EarlyStopping
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.jobs.build import build_callbacks, build_data, build_module, build_trainer
from midstride.engine.testing import run_ranks

CODE = """
from pathlib import Path

from midstride.engine import Callback
from midstride.engine.testing.laws.small_training import SmallData, SmallModule  # noqa: F401 - named by the job


class Counter(Callback):
    def __init__(self, every, file):
        self.every, self.file, self.seen = every, Path(file), 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen += 1

    def on_fit_end(self, trainer, module):
        with self.file.open("a") as file:
            file.write(f"{self.every}: {self.seen}\\n")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]
"""

JOB = """
name: counted
module: counted_code:SmallModule
data: counted_code:SmallData
data_args: {ranks: 1}
world: {strategy: single}
trainer: {max_epochs: 2, enable_progress_bar: false}
snapshots: {url: runs, every_steps: 2}
monitor: {metric: val/loss, patience: 9}
callbacks:
  - {path: "counted_code:Counter", args: {every: 2, file: ./seen}}
  - {path: "counted_code:Counter", args: {every: 3, file: ./seen}}
"""


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    """A job with two callbacks of one class, beside its code."""
    (tmp_path / "counted_code.py").write_text(CODE)
    (tmp_path / "job.yaml").write_text(JOB)
    return TrainingJob.load(tmp_path / "job.yaml")


def train(job: TrainingJob) -> None:
    build_trainer(job).fit(build_module(job), build_data(job), run=job.run_url("one"))


def test_callbacks_of_a_job_come_after_those_of_its_monitor(job: TrainingJob, tmp_path: Path) -> None:
    best, patient, first, second = build_callbacks(job)
    assert (type(best), type(patient)) == (BestCheckpoint, EarlyStopping)
    assert [(one.every, one.file) for one in (first, second)] == [(2, tmp_path / "seen"), (3, tmp_path / "seen")]  # type: ignore[attr-defined]


def test_callbacks_of_a_job_keep_their_state_through_a_death(job: TrainingJob, tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "plan").add("kill", step=5, phase="forward")
    environment = {**os.environ, **plan.environment}
    assert [run_ranks(train, job, environment=environment) for _ in range(2)] == [[-9], [0]]
    plan.assert_all_fired()
    assert (tmp_path / "seen").read_text() == "2: 8\n3: 8\n"


@pytest.mark.parametrize(
    ("callback", "fault"),
    [
        ({"path": "counted_code:Count"}, "callbacks.0: .* has no 'Count', did you mean 'Counter'"),
        ({"path": "counted_code:SmallData"}, "callbacks.0: counted_code:SmallData is not a Callback"),
        ({"path": "counted_code:Counter", "args": {"every": 1}}, "callbacks.0.args.file: is missing"),
    ],
    ids=["name", "kind", "arguments"],
)
def test_a_fault_names_the_callback(job: TrainingJob, callback: dict[str, object], fault: str) -> None:
    broken = TrainingJob.model_validate({**job.model_dump(), "callbacks": [callback]})
    with pytest.raises(JobError, match=fault):
        build_callbacks(broken)


MAKERS = """
import functools
import subprocess

from midstride.engine import TrainingModule
from midstride.engine.testing.laws.small_training import SmallModule


def own():
    return SmallModule()


partial_of_a_class = functools.partial(SmallModule)
"""
LIBRARY = """
from midstride.engine import TrainingModule
from midstride.engine.testing.laws.small_training import SmallModule

def annotated() -> TrainingModule:
    return SmallModule()

def silent():
    return SmallModule()
"""


@pytest.mark.parametrize(
    ("module", "is_called"),
    [
        ("os:system", False),
        ("subprocess:call", False),
        ("counted_code:Counter", False),
        ("library_of_makers:silent", False),
        ("library_of_makers:annotated", True),
        ("makers:own", True),
        ("makers:partial_of_a_class", True),
    ],
)
def test_only_what_makes_a_module_is_called(
    module: str, is_called: bool, job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "makers.py").write_text(MAKERS)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "library_of_makers.py").write_text(LIBRARY)
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("makers.py", "counted_code.py"):
        (tmp_path / name).rename(folder / name)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    arguments = {"command": f"touch {tmp_path}/called"} if module == "os:system" else {}
    named = job.model_copy(update={"module": module, "module_args": arguments, "folder": str(folder)})
    if is_called:
        assert type(build_module(named)).__name__ == "SmallModule"
    else:
        with pytest.raises(JobError, match=f"module: {module} is not a TrainingModule. Name a class that inherits it"):
            build_module(named)
    assert not (tmp_path / "called").exists()
