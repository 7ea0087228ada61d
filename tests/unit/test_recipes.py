"""The recipes for schedulers: their files are what the schedulers take, and go by a run's exit codes."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML
from support.flow_runs import wait_for
from support.limit import LIMIT_S
from support.pages import blocks

from midstride.engine.session.requests import GRACE_S

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
FILES = {name: text for language in ("yaml", "bash") for name, text in blocks(PAGE, language)}


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(FILES[name])
    return found


def test_kubernetes_takes_the_job_and_goes_by_the_codes() -> None:
    job = document("job.yaml of the cluster")
    kubernetes_validate.validate(job, "1.34.0", strict=True)
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {2: "FailJob", 75: "Ignore"}
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "a policy for failures needs it"
    assert pod["terminationGracePeriodSeconds"] > GRACE_S + 5


def test_skypilot_recovers_from_what_a_retry_may_help() -> None:
    task = document("sky.yaml")
    assert set(task) == {"name", "workdir", "resources", "setup", "run"}
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75, 1]}
    assert "midstride fit job.yaml --run digits-1" in task["run"]


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return an environment with stand-ins of `midstride` and `scontrol`, and the script of the page."""
    (tmp_path / "digits.sbatch").write_text(FILES["digits.sbatch"])
    stand_ins = {
        "midstride": 'trap "exit 75" TERM; echo "$@" > started; until [ -e code ]; do sleep 0.1; done; exit $(<code)',
        "scontrol": 'echo "$@" > requeued',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, False), (1, 0, True), (1, 20, False), (2, 0, False), (75, 0, True), (75, 99, True)],
)
def test_slurm_requeues_by_the_code(
    cluster: dict[str, str], tmp_path: Path, code: int, restarts: int, requeued: bool
) -> None:
    (tmp_path / "code").write_text(str(code))
    environment = {**cluster, "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", "digits.sbatch"], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == code
    assert (tmp_path / "started").read_text() == "fit job.yaml --run digits-1\n"
    assert (tmp_path / "requeued").exists() == requeued


def test_slurm_hands_a_sigterm_on_and_requeues(cluster: dict[str, str], tmp_path: Path) -> None:
    script = subprocess.Popen(["bash", "digits.sbatch"], cwd=tmp_path, env=cluster)
    wait_for((tmp_path / "started").exists, "the run to start")
    script.send_signal(signal.SIGTERM)
    assert script.wait(LIMIT_S) == 75
    assert (tmp_path / "requeued").read_text() == "requeue 41\n"
