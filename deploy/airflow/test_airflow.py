"""The provider in a real Airflow: deaths, stops and restarts cost no bit. `make test-airflow`."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.airflow import Airflow, DagRun
from support.flow_runs import STEPS, results, tiny_job, wait_for
from support.pages import ROOT, blocks
from support.slurm import MISSING, Slurm

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.launch.launch import launch
from midstride.engine.runs.run import Run

HERE = Path(__file__).parent
PROGRAM = os.environ.get("AIRFLOW", "")
DATE = "2026-03-01"

#: one task each: a wrong model, a training that waits at step 8, the same by a scheduler, by a real Slurm
OWN_DAGS = """
import os
from datetime import timedelta
from airflow.sdk import DAG, Asset
from midstride_airflow.operators import MidstrideFitOperator

FOLDER = os.environ["MIDSTRIDE_JOB"].rpartition("/")[0]
ALL = {"run": "{{ dag.dag_id }}", "command": os.environ["MIDSTRIDE"], "retries": 2, "retry_delay": timedelta(seconds=1)}
SUBMIT = {"submit": [f"{FOLDER}/submit.sh"], "cancel": ["kill"], "poll_s": 0.5}
ROWS = {
    "broken": {},
    "held": {"outlets": [Asset("held_weights")]},
    "queued": SUBMIT,
    "queued_and_stopped": SUBMIT,
    "in_slurm": {
        "submit": ["sbatch", "--parsable", "--no-requeue", f"{FOLDER}/train.sh"],
        "cancel": ["scancel", "--batch", "--signal=TERM"],
        "poll_s": 0.5,
    },
}

for name, options in ROWS.items():
    with DAG(name, schedule=None) as dag:
        MidstrideFitOperator(task_id="fit", job=f"{FOLDER}/{name}/job.yaml", **ALL, **options)
    globals()[name] = dag
"""
#: a scheduler: it runs a command apart from this one, and prints what it calls it
SUBMIT = '#!/bin/sh\nsetsid "$@" > /dev/null 2>&1 &\necho $!\n'
TRAIN = '#!/bin/sh\n#SBATCH --output=/dev/null\nexec "$@"\n'


@dataclass(frozen=True)
class House:
    """Airflow, the folder of its jobs, and the fault of the night."""

    airflow: Airflow
    folder: Path
    plan: FaultPlan

    def job(self, name: str = "") -> TrainingJob:
        return TrainingJob.load(self.folder / name / "job.yaml")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder, home = tmp_path_factory.mktemp("jobs"), tmp_path_factory.mktemp("airflow")
    tiny_job(folder)
    tiny_job(folder / "broken", processes=1, fail_at=3)
    for name in ("held", "queued", "queued_and_stopped", "in_slurm"):
        tiny_job(folder / name, processes=1, wait_at=8)
    (folder / "submit.sh").write_text(SUBMIT)
    (folder / "submit.sh").chmod(0o755)
    (folder / "train.sh").write_text(TRAIN)
    (home / "dags").mkdir()
    (home / "dags" / "own.py").write_text(OWN_DAGS)
    night = (HERE / "dags" / "midstride_nightly.py").read_text()
    (home / "dags" / "nightly.py").write_text(night.replace('schedule="0 2 * * *"', "schedule=None"))
    for name, text in blocks(ROOT / "docs/airflow.md", "python"):
        (home / "dags" / name).write_text(text)
    (folder / "faults").mkdir()
    plan = FaultPlan(folder / "faults").add("kill", rank=1, step=8, phase="backward")
    environment = {
        "MIDSTRIDE": str(Path(sys.executable).with_name("midstride")),
        "MIDSTRIDE_JOB": str(folder / "job.yaml"),
        "MIDSTRIDE_RETRY_DELAY_S": "1",
        **plan.environment,
    }
    with _slurm(tmp_path_factory) as of_slurm, Airflow(PROGRAM, home, **environment, **of_slurm).running() as airflow:
        yield House(airflow, folder, plan)


@contextmanager
def _slurm(folders: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run a Slurm in the block, if it is installed; give the variables by which its commands find it."""
    if MISSING:
        yield {}
        return
    slurm = Slurm(folders.mktemp("slurm"))
    yield slurm.environment
    slurm.close()


def _outcomes(job: TrainingJob, run: str) -> list[str]:
    return [attempt.outcome for attempt in Run(job, run).attempts.attempts()]


def _undisturbed(job: TrainingJob) -> dict[str, bytes]:
    """Return the results of a run that nothing happens to: that which waits goes on at once."""
    Path(job.folder, "mark").touch()
    assert launch(Run(job, "reference")).kind == "done"
    return results(job, "reference")


@pytest.mark.timeout(900)
def test_a_killed_rank_costs_a_retry_and_a_clear_no_training(house: House) -> None:
    job, run = house.job(), f"nightly-{DATE}"
    night = house.airflow.run("midstride_nightly", DATE)
    assert set(night.ended().values()) == {"success"}
    house.plan.assert_all_fired()
    assert _outcomes(job, run) == ["died", "done"]
    assert night.tasks()["fit"]["try_number"] == 2
    assert results(job, run) == _undisturbed(job)

    assert night.result("prepare")["files"] == 1
    fitted = night.result("fit")
    assert (fitted["state"], fitted["step"], fitted["url"]) == ("done", STEPS, job.run_url(run))
    scores = night.result("evaluate")
    decision = night.result("compare")
    assert (decision["promoted"], decision["challenger"], decision["champion_run"]) == (True, scores, run)
    assert Path(decision["champion_weights"], "manifest.json").exists()
    [event] = _events(house.airflow, "midstride_champion")
    assert event["extra"] == decision

    before = night.tasks()
    night.clear("evaluate")
    wait_for(lambda: night.tasks()["compare"]["try_number"] > before["compare"]["try_number"], "another try")
    assert set(night.ended().values()) == {"success"}
    after = night.tasks()
    assert [after[task]["try_number"] - before[task]["try_number"] for task in before] == [
        int(task in ("evaluate", "compare")) for task in before
    ]
    assert _outcomes(job, run) == ["died", "done"], "nothing is trained again"
    assert night.result("compare") == decision


@pytest.mark.timeout(900)
def test_an_error_in_the_users_code_is_not_retried(house: House) -> None:
    broken = house.airflow.run("broken", DATE)
    assert broken.ended() == {"fit": "failed"}
    assert broken.tasks()["fit"]["try_number"] == 1
    assert _outcomes(house.job("broken"), "broken") == ["user_error"]


@pytest.mark.timeout(900)
def test_a_stopped_task_takes_a_snapshot_and_a_clear_resumes(house: House) -> None:
    job = house.job("held")
    held = house.airflow.run("held", DATE)
    wait_for(Path(job.folder, "mark").exists, "the step at which the model waits")
    held.fail("fit")
    _is_stopped_and_resumes(job, held, "held")
    assert [event["extra"] for event in _events(house.airflow, "held_weights")] == [held.result("fit")]


@pytest.mark.timeout(900)
def test_a_queued_training_outlives_the_triggerer(house: House) -> None:
    job = house.job("queued")
    queued = house.airflow.run("queued", DATE)
    queued.until("fit", "deferred")
    wait_for(Path(job.folder, "mark").exists, "the step at which the model waits")
    house.airflow.stop("triggerer", signal.SIGTERM)
    house.airflow.start("triggerer")
    Path(job.folder, "mark-over").touch()
    assert queued.ended() == {"fit": "success"}
    assert queued.tasks()["fit"]["try_number"] == 1
    assert _outcomes(job, "queued") == ["done"]
    assert results(job, "queued") == _undisturbed(job)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "queued_and_stopped",
        pytest.param("in_slurm", marks=pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")),
    ],
)
def test_a_queued_training_is_stopped_with_its_task(name: str, house: House) -> None:
    job = house.job(name)
    queued = house.airflow.run(name, DATE)
    queued.until("fit", "deferred")
    wait_for(Path(job.folder, "mark").exists, "the step at which the model waits")
    queued.fail("fit")
    _is_stopped_and_resumes(job, queued, name)


def _is_stopped_and_resumes(job: TrainingJob, dag_run: DagRun, run: str) -> None:
    wait_for(lambda: _outcomes(job, run) == ["stopped"], "the training to end")
    assert Run(job, run).catalog.snapshots()[-1].position.step >= 8, "the last snapshot, and not the one of step 5"
    assert dag_run.ended() == {"fit": "failed"}
    dag_run.clear("fit")
    wait_for(lambda: _outcomes(job, run) == ["stopped", "done"], "the training to resume")
    assert dag_run.ended() == {"fit": "success"}
    assert results(job, run) == _undisturbed(job)


def _events(airflow: Airflow, asset: str) -> list[dict[str, object]]:
    return [one for one in airflow.ask("GET", "assets/events")["asset_events"] if one["name"] == asset]


def test_dags_of_the_page_are_dags(house: House) -> None:
    wait_for(lambda: house.airflow.ask("GET", "dags/digits/details"), "the DAG of the page")
    assert house.airflow.ask("GET", "importErrors")["import_errors"] == []


def test_airflow_lists_the_provider() -> None:
    command = [PROGRAM, "providers", "list", "--output", "json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "midstride-airflow" in [one["package_name"] for one in listed]


def test_the_provider_needs_none_of_our_libraries() -> None:
    python = Path(PROGRAM).with_name("python")
    code = (
        "import sys, midstride_airflow.operators; "
        "assert not {'torch', 'prefect', 'midstride'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([python, "-c", code], check=True)
    assert shutil.which("midstride", path=str(python.parent)) is None
