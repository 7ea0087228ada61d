"""Retry, pressed in a browser: the example fails for good, and goes on where it was."""

from pathlib import Path

import pytest
from support.flow_runs import results, wait_for
from ui.site import Site

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.launch.launch import launch
from midstride.engine.runs.run import Run

KILLED_AT, SNAPSHOT = 60, 50

pytestmark = pytest.mark.timeout(1500)  # two worlds that die, one that does not, and a browser


def test_retry_in_the_ui_resumes_the_example_exactly(example: Path, site: Site, tmp_path: Path) -> None:
    job = TrainingJob.load(example, ["trainer.max_epochs=3", "retries_without_progress=0", "data_args.folder=./data"])
    assert launch(Run(job, "reference")).kind == "done"
    plan = FaultPlan(tmp_path / "plan")
    for _ in range(2):  # and a second time, which is one too many
        plan.add("kill", rank=1, step=KILLED_AT, phase="backward")
    run = site.run(job, **plan.environment)
    run.reaches("Failed")
    plan.assert_all_fired()
    wait_for(lambda: "giving up" in run.logs(), "the last words to reach the server", 300)
    with site.browser() as screen:
        screen.show(run.id)
        screen.sees("Failed")
        screen.newest_first()
        screen.sees("giving up")
        screen.picture("failed-run")
        screen.open_menu()
        screen.picture("retry", 260)
        screen.retry()
        wait_for(lambda: run.state != "Failed", "Retry to reach the server", 300)
        run.reaches("Completed")
        screen.show(run.id)  # anew: a page that stands open draws the graph rarely
        screen.tab("Task Runs")
        screen.sees("1 Cached")
        screen.search("prepare data")
        screen.misses("publish report")
        screen.picture("resumed-run", 810)
        screen.show_artifact(run.artifact("progress")["id"])
        screen.sees(f"resumed at step {SNAPSHOT}")
        screen.picture("progress", 330)
        screen.show_artifact(run.artifact("report")["id"])
        screen.sees("Interruptions")
        screen.picture("report")
    assert results(job, run.id) == results(job, "reference")
    wait_for(lambda: f"resumed from snapshot {SNAPSHOT:012d}" in run.logs(), "the log to say where it went on", 300)
    assert run.artifact("progress")["description"].endswith(f"resumed at step {SNAPSHOT}")
    assert "(reference)" in run.artifact("report")["data"], "the best of other runs"
