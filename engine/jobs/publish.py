"""Tell the trackers of a job whose weights are in charge, in a process that their libraries cannot harm."""

from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.registry.tracker_promotion import publish_champion
from midstride.engine.runs.run import Run
from midstride.engine.storage.store import Store

__all__ = ["publish"]


def publish(run: Run) -> list[str]:
    """Have the loggers of the job of `run` promote its champion; return a message for each that could not."""
    job = run.job
    loggers = [options.in_project(job.name) for options in job.loggers]
    return publish_champion(ModelRegistry.of(job), Store.open(job.store_url, job.store_terms), loggers, job.folder)
