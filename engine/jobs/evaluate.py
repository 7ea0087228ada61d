"""Evaluate weights on a job's test data, in one process: every sample once."""

from typing import Any

from midstride.engine.config.import_paths import make_importable
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import SnapshotMissing, UserError
from midstride.engine.formatting import format_names
from midstride.engine.jobs.build import build_data, build_module, devices_of
from midstride.engine.modules.module import DataModule, TrainingModule, has_step
from midstride.engine.registry.registry import ModelRegistry, champion_weights_explained
from midstride.engine.runs.run import Run
from midstride.engine.seeds import seed_everything
from midstride.engine.snapshots.catalog import WEIGHTS
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.snapshots.weights import folder_to_test
from midstride.engine.training.trainer import Trainer

__all__ = ["evaluate", "evaluate_with_champion", "of_one_process", "weights_of"]


def evaluate(run: Run, weights: str | None = None, step: int | None = None) -> dict[str, float]:
    """Return the test metrics of a run; of a script, the values that it logged with the weights.

    The run can be in training.

    Args:
        run: a run.
        weights: "best" or "last", or a folder or URL. If None, the best; the last without weights that are best by
            the job's monitor.
        step: the weights of the snapshot at this step instead.

    Raises:
        UserError: there is no such snapshot, or a script has logged nothing with the weights.
        SnapshotMissing: no weights were saved; the message names the steps of snapshots.
    """
    try:
        return _measured(run.job, weights_of(run, weights) if step is None else _snapshot_at(run, step))
    except SnapshotMissing as error:
        if run.job.script is None and weights is None and step is None and (steps := _steps(run)):
            raise SnapshotMissing(f"{error}. Its snapshots can be tested by their step: {steps}") from error
        raise


def _measured(job: TrainingJob, weights: str) -> dict[str, float]:
    if job.script is None:
        return _test(job, weights)
    if not (logged := _logged(job, weights)):
        raise UserError(
            f"{job.script} has logged nothing with {weights}, and only the script itself can test: call "
            "loop.log(name, value), then loop.save_weights()"
        )
    return logged


def _snapshot_at(run: Run, step: int) -> str:
    if found := [snapshot for snapshot in run.catalog.snapshots() if snapshot.position.step == step]:
        return f"{run.url}/{found[-1].path}"
    steps = _steps(run)
    raise UserError(f"{run.url} has no snapshot of step {step}: {f'choose one of {steps}' if steps else 'it has none'}")


def _steps(run: Run) -> str:
    return format_names([str(snapshot.position.step) for snapshot in run.catalog.snapshots()])


def weights_of(run: Run, weights: str | None) -> str:
    """Return the folder or URL of weights of a run, chosen as for `evaluate`."""
    if weights not in (None, *WEIGHTS):
        return weights
    return f"{run.url}/{weights or folder_to_test(run.store)}"


def evaluate_with_champion(run: Run) -> dict[str, Any]:
    """Test the weights of `run` and those of the champion, on the same data.

    The champion is built as it was, from the module and the arguments that its own job named. Weights of scripts are
    compared by the values that were logged when they were saved.

    Returns:
        {"challenger": values, "weights": "best" or "last", "champion": values or None, "over": its number or None}
    """
    registry = ModelRegistry.of(run.job)
    champion = registry.current()
    theirs = None
    measure = _test if run.job.script is None else _logged
    if champion is not None:
        as_it_was = run.job.model_copy(update={"module": champion.module, "module_args": champion.module_args})
        theirs = measure(as_it_was, registry.weights_url(champion))
    weights = folder_to_test(run.store)
    return {
        "challenger": measure(run.job, f"{run.url}/{weights}"),
        "weights": weights,
        "champion": theirs,
        "over": champion and champion.number,
    }


def _test(job: TrainingJob, weights: str) -> dict[str, float]:
    trainer, module, data = of_one_process(job)
    if not has_step(module, "test_step"):
        return {}
    with champion_weights_explained(weights):
        return trainer.test(module, data, ckpt_path=weights)


def _logged(job: TrainingJob, weights: str) -> dict[str, float]:
    """Return the values that a script had logged when it saved its weights."""
    with champion_weights_explained(weights):
        return dict(weights_at(weights).facts.get("metrics", {}))  # a snapshot has none


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
