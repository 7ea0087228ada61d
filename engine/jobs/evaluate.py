"""Evaluate weights on a job's test data, in one process: every sample once."""

from typing import Any

from midstride.engine.config.import_paths import make_importable
from midstride.engine.config.job import TrainingJob
from midstride.engine.jobs.build import build_data, build_module, devices_of
from midstride.engine.modules.module import DataModule, TrainingModule
from midstride.engine.registry.registry import ModelRegistry, champion_weights_explained
from midstride.engine.runs.run import Run
from midstride.engine.seeds import seed_everything
from midstride.engine.snapshots.catalog import WEIGHTS
from midstride.engine.snapshots.weights import folder_to_test
from midstride.engine.training.trainer import Trainer

__all__ = ["evaluate", "evaluate_with_champion", "of_one_process", "weights_of"]


def evaluate(run: Run, weights: str | None = None) -> dict[str, float]:
    """Return the test metrics of a run.

    Args:
        run: a run.
        weights: "best" or "last", or a folder or URL. If None, the best; the last without weights that are best by
            the job's monitor.
    """
    return _test(run.job, weights_of(run, weights))


def weights_of(run: Run, weights: str | None) -> str:
    """Return the folder or URL of weights of a run, chosen as for `evaluate`."""
    if weights not in (None, *WEIGHTS):
        return weights
    return f"{run.url}/{weights or folder_to_test(run.store)}"


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
    trainer, module, data = of_one_process(job)
    if type(module).test_step is TrainingModule.test_step:
        return {}
    with champion_weights_explained(weights):
        return trainer.test(module, data, ckpt_path=weights)


def of_one_process(job: TrainingJob) -> tuple[Trainer, TrainingModule, DataModule]:
    """Return a Trainer of one process, and the module and data of `job`.

    Initial weights of the job are not loaded.
    """
    job = job.model_copy(update={"weights": None})
    make_importable(job.folder)
    seed_everything(job.seed)
    module, data = build_module(job), build_data(job)
    trainer = Trainer(seed=job.seed, **devices_of(job.world.of_one_process), **job.trainer.model_dump())
    return trainer, module, data
