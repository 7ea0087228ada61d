"""Retry, pressed in a browser: the example fails for good, and goes on where it was."""

import shutil
from pathlib import Path

import pytest
from flow_runs import results, wait_for
from ui.browser import browser
from ui.site import Site

from midstride.engine.faults import FaultPlan
from midstride.engine.job import TrainingJob
from midstride.engine.launch import launch

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "digits"
KILLED_AT, SNAPSHOT = 60, 50

pytestmark = pytest.mark.timeout(1500)  # two worlds that die, one that does not, and a browser


@pytest.fixture
def example(tmp_path: Path) -> TrainingJob:
    """The example, shorter, and without patience."""
    for name in ("job.yaml", "model.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    changes = ["trainer.max_epochs=3", "retries=0", "data_args.folder=./data"]
    return TrainingJob.load(tmp_path / "job.yaml", changes)


def test_retry_in_the_ui_resumes_the_example_exactly(
    example: TrainingJob, site: Site, tmp_path: Path, pictures: Path
) -> None:
    assert launch(example, "reference").kind == "done"
    (tmp_path / "plan").mkdir()
    plan = FaultPlan(tmp_path / "plan")
    for _ in range(2):  # and a second time, which is one too many
        plan.add("kill", rank=1, step=KILLED_AT, phase="backward")
    run = site.run(example, **plan.environment)
    run.reaches("Failed")
    plan.assert_all_fired()
    wait_for(lambda: "giving up" in run.logs(), "the last words to reach the server")
    with browser(site.address, pictures) as screen:
        screen.show(run.id)
        screen.sees("Failed")
        screen.newest_first()
        screen.sees("giving up")
        screen.picture("failed-run")
        screen.retry()
        wait_for(lambda: run.state != "Failed", "Retry to reach the server")
        run.reaches("Completed")
        screen.tab("Task Runs")
        screen.sees("Cached")
        screen.picture("resumed-run")
        wait_for(lambda: f"resumed from snapshot {SNAPSHOT:012d}" in run.logs(), "where it went on from")
        screen.show_artifact(f"{run.id}-report")
        screen.sees("Interruptions")
        screen.picture("report")
    assert results(example, run.id) == results(example, "reference")
    assert run.artifact("progress")["description"].endswith(f"resumed at step {SNAPSHOT}")
    assert "(reference)" in run.artifact("report")["data"], "the best of other runs"
