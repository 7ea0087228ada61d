"""Everything that is wrong with a job, found without training: `midstride check`."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from midstride.engine.config.arguments import texts_in
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import EngineError, JobError, NoLoss, UserCodeError
from midstride.engine.formatting import format_count
from midstride.engine.jobs.build import build_callbacks, build_data, build_module, build_trainer
from midstride.engine.jobs.script import try_script
from midstride.engine.modules.module import DataModule, TrainingModule, has_step
from midstride.engine.processes.environment import cores
from midstride.engine.registry.comparison import missing_metric
from midstride.engine.registry.nightly import date_to_try, judged_by, nightly_errors, with_date
from midstride.engine.storage.store import Store
from midstride.engine.training.trainer import Trainer

__all__ = ["job_errors"]

T = TypeVar("T")

#: in names of values that are better if larger
_SCORE = re.compile(
    r"(?!.*(loss|err)).*((?<![a-z])acc(?![a-z])|accuracy|auc|auroc|f1|recall|precision|iou|dice|bleu|rouge|r2|reward)",
    re.IGNORECASE,
)


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
        say: called with the next action.
        warn: called with settings that train, but are probably unintended.
    """
    for warning in filter(None, (_rank_warning(job), _mode_warning(job))):
        warn(warning)
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
    faults += _quoted_numbers(job) if faults else []
    return [*dict.fromkeys(faults)]  # a file that cannot be imported fails for both module and data


def _collect(faults: list[str], doing: str, act: Callable[[], T]) -> T | None:
    """Return the result of `act`; if it raises, add the error to `faults` and return None."""
    try:
        return act()
    except JobError as error:  # the first line counts them
        head, *lines = str(error).splitlines()
        faults += [line.strip() for line in lines] or [head]
    except EngineError as error:
        faults.append(str(error))
    except (Exception, SystemExit) as error:
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


def _quoted_numbers(job: TrainingJob) -> list[str]:
    """Return a message for each argument that is the text of a number."""
    texts = [*texts_in(job.module_args, "module_args"), *texts_in(job.data_args, "data_args")]
    found = [(key, text) for key, text in texts if re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", text, re.IGNORECASE)]
    return [f"{key}: {text!r} is text: leave the quotes out if a number is meant" for key, text in found]


def _mode_warning(job: TrainingJob) -> str:
    monitor = job.monitor
    if monitor is None or "mode" in monitor.model_fields_set or not _SCORE.match(monitor.metric):
        return ""
    return f"monitor.mode: the smallest {monitor.metric} counts as the best; set mode: max if more is better"


def _rank_warning(job: TrainingJob) -> str:
    processes, there = job.world.processes, cores()
    if processes <= there:
        return ""
    return f"world.processes: {processes} processes share the {format_count(there, 'core')} of this machine"


#: batches that a module may skip before one has a loss
_SKIPPED = 9


def dry_run(
    job: TrainingJob,
    module: TrainingModule,
    data: DataModule,
    *,
    needed: Mapping[str, str],
    warn: Callable[[str], object],
) -> list[str]:
    """Return faults of `job`; errors of a step or an evaluation are raised.

    Args:
        job: the job to try.
        module: the job's, built.
        data: the job's, prepared.
        needed: values that the test has to log, with the key of the job that names each.
        warn: called with a warning about batches that are larger than the data.
    """
    strategy = STRATEGIES.get(job.world.strategy)
    if strategy is None or strategy.shards_weights or strategy.devices:
        return []  # its modules may not train on one device of one process
    tested: dict[str, float] = {}
    with quietly():
        trainer = _fitted(job, module, data)
        logged = sorted(trainer.metric_logger.values)
        if trainer.loaders is not None and (warning := _batch_warning(job, trainer.loaders.training)):
            warn(warning)
        if has_step(module, "test_step"):
            tested = trainer.test(module, data)
    faults = [fault for name, key in needed.items() for fault in missing_metric(tested, name, key)]
    if job.monitor is not None and job.monitor.metric not in logged:
        faults.append(
            f"monitor: {job.monitor.metric} is not logged; logged: {', '.join(logged) or 'nothing'}. Values of "
            f"validation_step need a val_dataloader of {job.data}"
        )
    return faults


def _batch_warning(job: TrainingJob, training: ResumableLoader) -> str:
    samples = training.order_identity().get("samples")
    if samples is None or training.batch_size is None or training.batch_size * job.world.ranks <= samples:
        return ""
    ranks = f" on each of {job.world.ranks} ranks" if job.world.ranks > 1 else ""
    return f"a batch of {training.batch_size:,}{ranks} is more than the {samples:,} samples of an epoch"


def _fitted(job: TrainingJob, module: TrainingModule, data: DataModule) -> Trainer:
    """Return a Trainer that has trained one batch, or more if the module skips the first."""
    for batches in (1, _SKIPPED + 1):
        trainer = build_trainer(_shortened(job, batches))
        try:
            trainer.fit(module, data)
            break
        except NoLoss:
            if batches > 1 or job.world.ranks > 1:
                raise
    return trainer


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress repeated log messages and those about the process group of this process."""
    said = [
        logging.getLogger(name)
        for name in (
            "midstride",
            "midstride.engine.training.fit",
            "midstride.engine.training.fit_loop",
            "midstride.engine.training.losses",
        )
    ]
    for logger in said:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in said:
            logger.disabled = False


def _shortened(job: TrainingJob, batches: int) -> TrainingJob:
    """Return `job` with one epoch of `batches` batches, and one batch of each evaluation."""
    options = job.trainer
    deterministic = job.snapshots is not None if options.deterministic is None else options.deterministic
    changed = {
        "limit_train_batches": batches if options.limit_train_batches else 0,
        "limit_val_batches": 1 if options.limit_val_batches else 0,
        "limit_test_batches": 1,
        "max_epochs": 1,
        "accumulate_grad_batches": 1,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "deterministic": deterministic,
        "enable_progress_bar": False,
    }
    return job.model_copy(
        update={
            "trainer": options.model_copy(update=changed),
            "world": job.world.of_one_process,
            "snapshots": None,
            "loggers": (),
        }
    )
