"""A sweep: train each setting, compare them, promote the best. A Retry of the flow continues it."""

from itertools import product
from pathlib import Path
from typing import Any

from prefect import flow, task, unmapped
from prefect.artifacts import create_table_artifact
from prefect.task_runners import ThreadPoolTaskRunner

from midstride.engine import TrainingJob
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.runs.run_report import Report
from midstride.flows import train
from midstride.tasks import compare_and_promote

JOB = str(Path(__file__).with_name("job.yaml"))
#: key of the job -> its values; each combination is a trial
GRID: dict[str, list[Any]] = {"module_args.hidden": [4, 32], "module_args.learning_rate": [0.003, 0.03]}
TRIALS_AT_ONCE = 2


@task(task_run_name="{settings}")
def trial(job: str, settings: list[str]) -> Report:
    """Train one setting, or find that it is done."""
    return train(TrainingJob.load(job, settings))


@flow(task_runner=ThreadPoolTaskRunner(max_workers=TRIALS_AT_ONCE))
def sweep(job: str = JOB, grid: dict[str, list[Any]] = GRID) -> PromotionDecision:
    """Train each combination of `grid`, and promote the best if it beats the champion."""
    trials = [[f"{key}={value}" for key, value in zip(grid, values, strict=True)] for values in product(*grid.values())]
    reports = trial.map(unmapped(job), trials).result()
    monitor = TrainingJob.load(job).monitor
    assert monitor is not None
    by_value = sorted(zip(reports, trials, strict=True), key=lambda pair: pair[0].best[monitor.metric])
    ranked = by_value[::-1] if monitor.mode == "max" else by_value
    rows = [
        {"settings": ", ".join(settings), **report.best, **report.test, "restarts": report.restarts, "run": report.run}
        for report, settings in ranked
    ]
    create_table_artifact(rows, key="sweep", description=f"{len(rows)} trials, the best by {monitor.metric} first")
    report, settings = ranked[0]
    return compare_and_promote(TrainingJob.load(job, settings), report.run)


if __name__ == "__main__":
    print(sweep().why)
