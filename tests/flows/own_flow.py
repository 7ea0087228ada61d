"""Flows as others write them: several trainings side by side, in each way that Prefect and Python have."""

import asyncio
import faulthandler
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

from prefect import flow, task

from midstride.engine.launch.watchdog import DUMP_STACKS
from midstride.engine.runs.run_report import Report
from midstride.flows import train
from midstride.tasks import evaluate_best, launch_world, prepare_data, publish_report

HERE = Path(__file__).parent
JOBS = sorted(HERE.glob("*/job.yaml"))
if "PREFECT__FLOW_RUN_ID" in os.environ:  # not where it is deployed
    faulthandler.register(DUMP_STACKS)


@task
def one(job: Path) -> Report:
    """Train one job as a subflow of a task."""
    return train(job)


@flow
def submitted() -> None:
    """By `submit`."""
    for future in [one.submit(job) for job in JOBS]:
        future.result()


@flow
def mapped() -> None:
    """By `map` of the tasks themselves."""
    prepare_data.map(JOBS).result()
    launch_world.map(JOBS).result()
    for job, scores in zip(JOBS, evaluate_best.map(JOBS).result(), strict=True):
        publish_report(job, test=scores)


@flow
def threaded() -> None:
    """By threads of one's own."""
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(copy_context().run, train, job) for job in JOBS]:
            future.result()


@flow
async def awaited() -> None:
    """By asyncio."""
    await asyncio.gather(*(asyncio.to_thread(one, job) for job in JOBS))
