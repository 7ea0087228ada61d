"""Tries a job in this process: one step, and one batch of each evaluation.

Keeps nothing.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import NoLoss
from midstride.engine.jobs.build import build_trainer
from midstride.engine.modules.module import DataModule, TrainingModule
from midstride.engine.registry.comparison import missing_metric
from midstride.engine.training.trainer import Trainer

__all__ = ["dry_run", "quietly"]

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
    """Return messages on what `job` misses; errors of a step or an evaluation are raised.

    Args:
        job: what is tried.
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
        if type(module).test_step is not TrainingModule.test_step:
            tested = trainer.test(module, data)
    faults = [fault for name, key in needed.items() for fault in missing_metric(tested, name, key)]
    if job.monitor is not None and job.monitor.metric not in logged:
        faults.append(
            f"monitor: {job.monitor.metric} is not logged; logged: {', '.join(logged) or 'nothing'}. What a "
            f"validation_step logs needs a val_dataloader of {job.data}"
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
