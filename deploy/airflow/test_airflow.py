"""The DAG in a real Airflow: a rank is killed, Airflow retries, not a bit is lost. `make test-airflow`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.launch.launch import launch
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.storage.store import Store

DATE = "2026-03-01"
RUN = f"nightly-{DATE}"


class Airflow:
    """Airflow with a home of its own and this folder's DAG."""

    def __init__(self, home: Path, job: Path, **environment: str) -> None:
        self._environment = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(Path(__file__).parent),
            "MIDSTRIDE": str(Path(sys.executable).with_name("midstride")),
            "MIDSTRIDE_JOB": str(job),
            "MIDSTRIDE_RETRIES": "3",
            "MIDSTRIDE_RETRY_DELAY_S": "1",
            **environment,
        }
        self("db", "migrate")

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run a command of Airflow; return its output."""
        command = [os.environ["AIRFLOW"], *arguments]
        done = subprocess.run(
            command, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr


def _outcomes(job: TrainingJob) -> list[str]:
    return [attempt.outcome for attempt in AttemptLog(Store.open(job.run_url(RUN))).attempts()]


@pytest.mark.timeout(900)
def test_a_killed_rank_costs_a_retry_and_not_a_bit(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    assert launch(Run(job, "reference")).kind == "done"
    (tmp_path / "faults").mkdir()
    plan = FaultPlan(tmp_path / "faults").add("kill", rank=1, step=8, phase="backward")
    airflow = Airflow(tmp_path / "airflow", tmp_path / "job.yaml", **plan.environment)
    said = airflow("dags", "test", "midstride_nightly", DATE)
    plan.assert_all_fired()
    assert _outcomes(job) == ["died", "done"], said
    assert results(job, RUN) == results(job, "reference")


@pytest.mark.timeout(900)
def test_an_error_in_the_users_code_is_not_retried(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, processes=1, fail_at=3)
    airflow = Airflow(tmp_path / "airflow", tmp_path / "job.yaml")
    said = airflow("dags", "test", "midstride_nightly", DATE, check=False)
    assert _outcomes(job) == ["user_error"], said
    assert "the model is not in the mood" in said
