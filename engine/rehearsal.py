"""A job tried for a moment: one step, one batch of each evaluation, in this process alone, nothing kept."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from midstride.engine.champions.decision import lacking
from midstride.engine.job import TrainingJob
from midstride.engine.world_options import WorldOptions

if TYPE_CHECKING:
    from midstride.engine.module import DataModule, TrainingModule

__all__ = ["rehearse"]

#: strategies whose modules train on one device of one process as well
_ALONE = ("single", "dp", "ddp", "ddp2", "horovod")


def rehearse(job: TrainingJob, module: "TrainingModule", data: "DataModule", *, judged_by: str = "") -> list[str]:
    """Return what is missed where nothing raises; what a step or an evaluation of `job` raises is raised.

    Args:
        job: what is tried.
        module: the job's, built.
        data: the job's, prepared.
        judged_by: the value that the test has to log, where there is one.
    """
    from midstride.engine.module import TrainingModule

    if job.world.strategy not in _ALONE:
        return []
    trainer = _shortened(job).build_trainer()
    tested: dict[str, float] = {}
    with _quietly():
        trainer.fit(module, data)
        if type(module).test_step is not TrainingModule.test_step:
            tested = trainer.test(module, data)
    faults = lacking(tested, judged_by) if judged_by else []
    if job.monitor is not None and trainer.loop is not None and trainer.loop.validation is None:
        where = f"{job.data} needs a val_dataloader"
        faults.append(f"monitor: {job.monitor.metric} is looked at after a validation, and there is none: {where}")
    return faults


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep back what a Trainer says about its world, which is not the job's."""
    said = logging.getLogger("midstride")
    said.disabled = True
    try:
        yield
    finally:
        said.disabled = False


def _shortened(job: TrainingJob) -> TrainingJob:
    """Return `job` with one step in one epoch, and a batch of each evaluation."""
    options = job.trainer
    deterministic = job.snapshots is not None if options.deterministic is None else options.deterministic
    short = {name: 1 if getattr(options, name) else 0 for name in ("limit_train_batches", "limit_val_batches")}
    changed = {
        **short,
        "limit_test_batches": 1,
        "max_epochs": 1,
        "accumulate_grad_batches": 1,
        "val_check_interval": 1.0,
        "deterministic": deterministic,
        "enable_progress_bar": False,
    }
    world = WorldOptions.model_validate({})
    return job.model_copy(update={"trainer": options.model_copy(update=changed), "world": world, "snapshots": None})
