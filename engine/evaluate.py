"""Evaluate a run's weights on its test data, in one process: every sample once."""

from typing import TYPE_CHECKING, Literal

from midstride.engine.imports import make_importable
from midstride.engine.seeds import seed_everything

if TYPE_CHECKING:
    from midstride.engine.job import TrainingJob

__all__ = ["evaluate"]


def evaluate(job: "TrainingJob", run: str, weights: Literal["best", "last"] = "best") -> dict[str, float]:
    """Return the test metrics of the weights that `run` kept.

    Args:
        job: the run's job.
        run: name of the run.
        weights: which of its folders; "last" if there never was a best.
    """
    from midstride.engine.module import TrainingModule
    from midstride.engine.snapshots.store import Store
    from midstride.engine.trainer import Trainer

    make_importable(job.folder)
    seed_everything(job.seed)
    module, data = job.build_module(), job.build_data()
    if type(module).test_step is TrainingModule.test_step:
        return {}
    trainer = Trainer(seed=job.seed, **job.trainer.model_dump())
    url = job.run_url(run)
    folder = weights if Store.open(url).exists(f"{weights}/manifest.json") else "last"
    return trainer.test(module, data, ckpt_path=f"{url}/{folder}")
