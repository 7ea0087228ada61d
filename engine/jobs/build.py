"""Builds module, data and Trainer of a job."""

import functools
import inspect
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from midstride.engine.config.import_paths import call_with, load_attribute
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.world import WorldOptions
from midstride.engine.errors import JobError, SnapshotDamaged, SnapshotMissing
from midstride.engine.jobs.script import check_script
from midstride.engine.lightning.adapt import adapt, is_lightning
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.module import DataModule, TrainingModule, has_step
from midstride.engine.modules.monitors import BestCheckpoint, EarlyStopping
from midstride.engine.modules.quantized import load_weights, weights_of
from midstride.engine.registry.registry import champion_weights_explained
from midstride.engine.runs.run import Run
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.training.trainer import Trainer

__all__ = ["build_callbacks", "build_data", "build_module", "build_trainer", "devices_of", "try_build"]

Built = TypeVar("Built")

#: keys of a job that decide a run, beside its Trainer's arguments
_IDENTITY = ("module", "module_args", "data", "data_args", "weights")


def build_module(job: TrainingJob) -> TrainingModule:
    """Return the job's module, built from its arguments, with the weights that the job says.

    Raises:
        JobError: it cannot be imported, takes other arguments, is no TrainingModule, or the weights do not fit.
        UserCodeError: importing or building it raises.
    """
    module = _build(job, "module", job.module, job.module_args, TrainingModule)
    if job.weights is not None:
        _load_weights(job, module, job.weights)
    return module


def build_data(job: TrainingJob) -> DataModule:
    """Return the job's data module, built from its arguments; raises as `build_module` does."""
    return _build(job, "data", job.data, job.data_args, DataModule)


def build_callbacks(job: TrainingJob) -> list[Callback]:
    """Return the callbacks of the job's monitor, then the job's own.

    Raises as `build_module` does.
    """
    callbacks: list[Callback] = []
    if (monitor := job.monitor) is not None:
        callbacks.append(BestCheckpoint(monitor.metric, monitor.mode))
        if monitor.patience is not None:
            callbacks.append(EarlyStopping(monitor.metric, monitor.patience, monitor.mode))
    for number, named in enumerate(job.callbacks):
        callbacks.append(_build(job, f"callbacks.{number}", named.path, named.args, Callback))
    return callbacks


def build_trainer(job: TrainingJob) -> Trainer:
    """Return the Trainer that `job` describes."""
    return Trainer(
        strategy=job.world.strategy,
        strategy_args=job.world.strategy_args,
        **devices_of(job.world),
        lanes=job.world.lanes,
        global_batch_size=job.world.global_batch_size,
        snapshots=job.snapshots,
        callbacks=build_callbacks(job),
        loggers=[options.in_project(job.name) for options in job.loggers],
        seed=job.seed,
        accept_change=job.accept_change,
        identity={key: getattr(job, key) for key in _IDENTITY},
        **job.trainer.model_dump(),
    )


def devices_of(world: WorldOptions) -> dict[str, Any]:
    """Return the arguments of a Trainer that say which devices its processes have."""
    said = {"devices": world.devices, "accelerator": world.accelerator, "auto_select_gpus": world.auto_select_gpus}
    return said if world.gpus is None else {**said, "gpus": world.gpus}


def try_build(run: Run) -> dict[str, bool]:
    """Build module and data of a job, or compile its script; return whether it can be tested."""
    if run.job.script is not None:
        check_script(run.job)
        return {"can be tested": True}
    module, _ = build_module(run.job), build_data(run.job)
    return {"can be tested": has_step(module, "test_step")}


def _build(job: TrainingJob, key: str, spec: str, arguments: dict[str, Any], kind: type[Built]) -> Built:
    where = f"job {job.name}"
    if job.script is not None:
        raise JobError.of(where, [f"script: {job.script} trains by a Loop, and this needs a module: name {key}"])
    try:
        make = load_attribute(spec, job.folder or Path.cwd(), key)
        if callable(make) and not _makes(make, kind, Path(job.folder or ".")):
            raise JobError(
                f"{key}: {spec} is not a {kind.__name__}. Name a class that inherits it, or a function: one in the "
                f"job's "
                f"folder, or one with the return annotation {kind.__name__}"
            )
        built = adapt(call_with(make, arguments, spec, f"{key}{'.' if '.' in key else '_'}args"))
    except JobError as error:
        raise JobError.of(where, str(error).splitlines()) from None
    if not isinstance(built, kind):
        fault = f"{key}: {spec} gives a {type(built).__name__}; a {kind.__name__} is needed"
        raise JobError.of(where, [fault])
    return built


def _makes(make: Any, kind: type, folder: Path) -> bool:
    """Return whether calling `make` probably gives a `kind`.

    A job must not call any function by its name.
    """
    if isinstance(make, functools.partial):
        return _makes(make.func, kind, folder)
    if isinstance(make, type):
        return issubclass(make, kind) or is_lightning(make)
    function = inspect.unwrap(make)
    if not inspect.isfunction(function):
        return False
    if Path(function.__code__.co_filename).resolve().is_relative_to(folder.resolve()):
        return True
    try:
        returned = get_type_hints(function).get("return")
    except Exception:  # the annotation names something that is not there
        return False
    return isinstance(returned, type) and _makes(returned, kind, folder)


def _load_weights(job: TrainingJob, module: TrainingModule, url: str) -> None:
    try:
        with champion_weights_explained(url):
            load_weights(module, weights_at(url).complete(lambda: weights_of(module)))
        return
    except (SnapshotDamaged, SnapshotMissing) as error:
        fault = str(error)
    except RuntimeError as error:  # torch's, naming each tensor that is too many, missing or of another shape
        fault = f"those of {url} do not fit {job.module}: {error}"
    raise JobError.of(f"job {job.name}", [f"weights: {fault}"])
