"""Evaluate weights on a job's test data, in one process: every sample once."""

from typing import Any

from midstride.engine.config.import_paths import make_importable
from midstride.engine.config.job import TrainingJob
from midstride.engine.jobs.build import build_data, build_module, devices_of
from midstride.engine.modules.module import TrainingModule
from midstride.engine.registry.registry import ModelRegistry, champion_weights_explained
from midstride.engine.runs.run import Run
from midstride.engine.seeds import seed_everything
from midstride.engine.snapshots.weights import folder_to_test
from midstride.engine.training.trainer import Trainer

__all__ = ["evaluate", "evaluate_with_champion"]


def evaluate(run: Run) -> dict[str, float]:
    """Return the test metrics of the best weights of `run`; of the last if none are the best by what it monitors."""
    return _test(run.job, f"{run.url}/{folder_to_test(run.store)}")


def evaluate_with_champion(run: Run) -> dict[str, Any]:
    """Test the weights of `run` and those of the champion, on the same data.

    The champion is built as it was, from the module and the arguments that its own job named.

    Returns:
        {"challenger": values, "weights": "best" or "last", "champion": values or None, "over": its number or None}
    """
    registry = ModelRegistry.of(run.job)
    champion = registry.current()
    theirs = None
    if champion is not None:
        as_it_was = run.job.model_copy(update={"module": champion.module, "module_args": champion.module_args})
        theirs = _test(as_it_was, registry.weights_url(champion))
    weights = folder_to_test(run.store)
    return {
        "challenger": _test(run.job, f"{run.url}/{weights}"),
        "weights": weights,
        "champion": theirs,
        "over": champion and champion.number,
    }


def _test(job: TrainingJob, weights: str) -> dict[str, float]:
    job = job.model_copy(update={"weights": None})  # others come
    make_importable(job.folder)
    seed_everything(job.seed)
    module, data = build_module(job), build_data(job)
    if type(module).test_step is TrainingModule.test_step:
        return {}
    trainer = Trainer(seed=job.seed, **devices_of(job.world.of_one_process), **job.trainer.model_dump())
    with champion_weights_explained(weights):
        return trainer.test(module, data, ckpt_path=weights)
