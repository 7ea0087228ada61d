"""Whether a job resumes exactly, tried on a few steps of it: `midstride check --resume`."""

import logging
from functools import partial
from typing import Any

from midstride.engine.config.job import TrainingJob
from midstride.engine.jobs.build import build_callbacks, build_data, build_module
from midstride.engine.testing.resume_check import assert_resumes_exactly

__all__ = ["resume_errors"]

#: what the check says itself, or what takes longer than a few steps
_LEFT_OUT = frozenset(
    {"max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "val_check_interval", "enable_progress_bar"}
)


def resume_errors(job: TrainingJob) -> list[str]:
    """Return differences after a few steps of `job` are interrupted and resumed.

    They are taken on the CPU, in processes of their own one after the other; nothing is kept. One attempt resumes in a
    new interpreter, so that data which follow the order of a set or of files are found.
    """
    if job.script is not None:
        return [f"--resume: {job.script} has a loop of its own; check it without, or kill it and start it again"]
    chosen: dict[str, Any] = {k: v for k, v in job.trainer.model_dump().items() if k not in _LEFT_OUT}
    own, quiet = logging.getLogger("midstride"), logging.NullHandler()
    own.addHandler(quiet)  # what each attempt says of its world is of no interest here
    try:
        module, data, callbacks = partial(build_module, job), partial(build_data, job), partial(build_callbacks, job)
        chosen |= {"seed": job.seed, "callbacks": callbacks, "gpus": 0}
        assert_resumes_exactly(module, data, in_new_interpreter=True, **chosen)
    except AssertionError as error:
        return [str(error)]
    finally:
        own.removeHandler(quiet)
    return []
