"""Publishes champions to the trackers of a job, in a separate process."""

from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.registry.tracker_promotion import publish_champion
from midstride.engine.runs.run import Run
from midstride.engine.storage.store import Store

__all__ = ["publish"]


def publish(run: Run) -> list[str]:
    """Have the loggers of the run's job promote its champion; return messages on failures."""
    job = run.job
    loggers = [options.in_project(job.name) for options in job.loggers]
    return publish_champion(ModelRegistry.of(job), Store.open(job.store_url, job.store_terms), loggers, job.folder)
