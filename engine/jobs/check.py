"""Everything that is wrong with a job, found without training: `midstride check`."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, UserCodeError
from midstride.engine.formatting import format_count
from midstride.engine.jobs.build import build_callbacks, build_data, build_module, build_trainer
from midstride.engine.jobs.dry_run import dry_run, quietly
from midstride.engine.jobs.script import try_script
from midstride.engine.modules.module import DataModule, TrainingModule
from midstride.engine.processes.environment import cores
from midstride.engine.registry.nightly import date_to_try, judged_by, nightly_errors, with_date
from midstride.engine.storage.store import Store

__all__ = ["job_errors"]

T = TypeVar("T")


def _say_nothing(_: str) -> None:
    pass


def job_errors(
    job: TrainingJob,
    date: str | None = None,
    *,
    say: Callable[[str], object] = _say_nothing,
    warn: Callable[[str], object] = _say_nothing,
) -> list[str]:
    """Return a message for every fault of `job`, also those of a step and an evaluation.

    The data is prepared on the way, as a run would do first. The store gets one small file, which is
    removed again. One step is taken, and one batch of validation and test, in this process alone.

    Args:
        job: the job. If it is meant to be trained nightly, the run of one night is tried.
        date: date of the data of that night, "" for today; given a date, a night is tried whatever the job.
        say: called with what is done next.
        warn: called with what trains, and is hardly meant.
    """
    if rank_warning := _rank_warning(job):
        warn(rank_warning)
    faults: list[str] = []
    needed: dict[str, str] = {}
    if (night := date_to_try(job, date)) is not None:
        faults, needed = nightly_errors(job, night), judged_by(job)
        job = with_date(job, night)
    if job.script is not None:
        _try_store(job, faults)
        _collect(faults, f"running {job.script}", partial(_try_script, job, say))
        return [*dict.fromkeys(faults)]
    module = _collect(faults, "building the module", partial(build_module, job))
    data = _collect(faults, "building the data", partial(build_data, job))
    callbacks = _collect(faults, "building the callbacks", partial(build_callbacks, job))
    _try_store(job, faults)
    if module is not None and data is not None and callbacks is not None:
        tried = partial(_training_faults, job, module, data, needed, say, warn)
        faults += _collect(faults, "checking the training", tried) or []
    return [*dict.fromkeys(faults)]  # a file that cannot be imported fails for module and data alike


def _collect(faults: list[str], doing: str, act: Callable[[], T]) -> T | None:
    """Return the result of `act`; if it raises, add the error to `faults` and return None."""
    try:
        return act()
    except JobError as error:  # the first line counts them
        head, *lines = str(error).splitlines()
        faults += [line.strip() for line in lines] or [head]
    except EngineError as error:
        faults.append(str(error))
    except Exception as error:
        faults.append(str(UserCodeError.of(doing, error)))
    return None


def _try_store(job: TrainingJob, faults: list[str]) -> None:
    _collect(faults, "trying the store", lambda: Store.open(job.store_url, job.store_terms).ensure_writable())


def _training_faults(
    job: TrainingJob,
    module: TrainingModule,
    data: DataModule,
    needed: dict[str, str],
    say: Callable[[str], object],
    warn: Callable[[str], object],
) -> list[str]:
    say("preparing the data")
    data.prepare_data()
    say("trying a step, and a batch of each evaluation")
    refused = build_trainer(job).check(module, data, processes=job.world.ranks)
    return refused or dry_run(job, module, data, needed=needed, warn=warn)


def _try_script(job: TrainingJob, say: Callable[[str], object]) -> None:
    say(f"running {job.script} until its first step is done")
    with quietly():
        try_script(job)


def _rank_warning(job: TrainingJob) -> str:
    processes, there = job.world.processes, cores()
    if processes <= there:
        return ""
    return f"world.processes: {processes} processes share the {format_count(there, 'core')} of this machine"
