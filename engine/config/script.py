"""A job that names a script, whose `Loop` takes the place of module, data and Trainer."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from midstride.engine.config.import_paths import IMPORT_PATH, import_path

if TYPE_CHECKING:
    from midstride.engine.config.job import TrainingJob

__all__ = ["ModulePath", "ScriptArguments", "ScriptPath", "is_script", "script_faults", "with_script_defaults"]

#: the options of `trainer` that a Loop takes from its job
_TRAINER = ("deterministic", "enable_progress_bar")
#: options of a job that belong to a module
_OF_MODULES = ("module", "module_args", "data", "data_args", "callbacks")
#: strategies that start processes without wrapping a module
_STRATEGIES = ("single", "ddp")


def _script_path(path: str) -> str:
    if PurePath(path).suffix != ".py":
        raise ValueError(f"the path of a Python file is needed, such as train.py, not {path!r}")
    return path


def _texts(values: Any) -> Any:
    """Return numbers among the arguments as texts: `args: [--layers, 12]`."""
    if not isinstance(values, (list, tuple)):
        return values
    return tuple(str(one) if type(one) in (int, float) else one for one in values)


def is_script(info: ValidationInfo) -> bool:
    """Return whether the job under validation names a script, or a faulty one."""
    return info.data.get("script", "") is not None


def _module_path(spec: str, info: ValidationInfo) -> str:
    return spec if not spec and is_script(info) else import_path(spec)


ScriptPath = Annotated[str, AfterValidator(_script_path), Field(json_schema_extra={"pattern": r"\.py$"})]
ScriptArguments = Annotated[tuple[str, ...], BeforeValidator(_texts)]
#: import path of a module; empty in the job of a script
ModulePath = Annotated[str, AfterValidator(_module_path), Field(json_schema_extra={"pattern": f"^$|{IMPORT_PATH}"})]


def with_script_defaults(document: Any) -> Any:
    """Return the document of a job, for a script with the keys that only a module needs."""
    if not isinstance(document, Mapping) or document.get("script") is None:
        return document
    filled = {"module": "", "data": "", "trainer": {}, **document}
    world = filled.get("world")
    if isinstance(world, Mapping) and "strategy" not in world:  # which decides what starts the processes
        several = world.get("processes", 1) != 1 or world.get("nodes", 1) not in (1, "1")
        filled["world"] = {**world, "strategy": "ddp" if several else "single"}
    return filled


def script_faults(job: "TrainingJob") -> list[str]:
    """Return a message for each option of `job` that does not go with its script."""
    if job.script is None:
        return ["args are the command line of a script: say script, or module_args"] if job.args else []
    fields, trainer, world = type(job).model_fields, job.trainer, job.world
    given = [name for name in _OF_MODULES if getattr(job, name) not in ("", fields[name].default)]
    given += [
        f"trainer.{name}"
        for name, field in type(trainer).model_fields.items()
        if name not in _TRAINER and getattr(trainer, name) != field.default
    ]
    given += [f"world.{name}" for name in ("lanes", "global_batch_size", "devices") if getattr(world, name) is not None]
    if world.strategy not in _STRATEGIES:
        given.append(f"world.strategy {world.strategy}")
    if job.monitor is not None and job.monitor.patience is not None:
        given.append("monitor.patience")
    faults = [f"{name} is not for a script: {job.script} decides that itself; leave it out" for name in given]
    if job.snapshots is None:
        faults.append(f"snapshots is null, and the Loop of {job.script} is there to take them: leave it out")
    return faults
