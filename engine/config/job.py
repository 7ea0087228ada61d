"""The training job: all deciding settings of a run, from one YAML file, with all its faults.

Importing this needs no torch: an orchestrator reads jobs without loading it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from midstride.engine.config.arguments import Arguments, map_texts
from midstride.engine.config.import_paths import IMPORT_PATH, import_path
from midstride.engine.config.json_schema import job_schema, plugin_schema
from midstride.engine.config.lanes import lane_conflicts
from midstride.engine.config.loggers import LoggerOptions, Loggers
from midstride.engine.config.options import (
    IdentityOption,
    MonitorOptions,
    NightlyOptions,
    Options,
    Place,
    SnapshotOptions,
    TrainerOptions,
)
from midstride.engine.config.strategies import STRATEGIES, conflicts
from midstride.engine.config.strategy_spec import StrategyRequest
from midstride.engine.config.validation import validation_errors
from midstride.engine.config.world import WorldOptions
from midstride.engine.errors import JobError
from midstride.engine.storage.store import StoreOptions
from midstride.engine.storage.urls import absolute_url

__all__ = ["IDENTITY_KEYS", "CallbackOptions", "TrainingJob"]


#: the options of `trainer` that a Loop takes from its job
_TRAINER = ("deterministic", "enable_progress_bar")
#: options of a job that belong to a module
_OF_MODULES = ("module", "module_args", "data", "data_args", "callbacks")
#: strategies that start processes without wrapping a module
_STRATEGIES = ("single", "ddp")
#: characters of the name of a run; drafts of files beside it have longer names
_LONGEST = 200


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
        return ["args are the command line of a script: set script, or module_args"] if job.args else []
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


ImportPath = Annotated[str, AfterValidator(import_path), Field(json_schema_extra={"pattern": IMPORT_PATH})]


class CallbackOptions(Options, json_schema_extra=plugin_schema):
    """A callback of your own, built in all ranks. Its `state_dict` is part of the run's state."""

    path: ImportPath = Field(title="Callback", description="package.module:attribute of the Callback.")
    args: Arguments = Field({}, title="Arguments", description="Keyword arguments of the callback.")


def _check_end(trainer: TrainerOptions, info: ValidationInfo) -> TrainerOptions:
    if trainer.max_epochs is trainer.max_steps is trainer.max_time is None and not is_script(info):
        raise ValueError("set max_epochs, max_steps or max_time: the training would never end")
    return trainer


Plugin = TypeVar("Plugin", CallbackOptions, LoggerOptions)
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]

IdentityKey = Literal[
    "script",
    "args",
    "module",
    "module_args",
    "data",
    "data_args",
    "weights",
    "seed",
    "global_batch_size",
    "samples",
    "drop_last",
    "shuffle",
    "sampler",
    IdentityOption,
    "precision",
    "strategy",
    "settings",  # values in attributes, and of optimizers and schedulers
    "bits",  # threads, CPU, GPU and versions, which a run in lanes must have as well
]


def _keys_in(kind: Any) -> Iterator[str]:
    """Yield the texts of a Literal, in which others may be nested."""
    for one in get_args(kind):
        yield from [one] if isinstance(one, str) else _keys_in(one)


#: all of them
IDENTITY_KEYS = frozenset(_keys_in(IdentityKey))


class TrainingJob(Options):
    """Settings of a training. A run is a job and a name."""

    model_config = ConfigDict(json_schema_extra=job_schema)

    name: str = Field(
        title="Name",
        description="Identifies the job in Prefect, in trackers and among champions.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
    )
    script: ScriptPath | None = Field(
        None,
        title="Script",
        description="Python file with a Loop, in the code folder, in place of module and data.",
    )
    args: ScriptArguments = Field((), title="Script arguments", description="Command line of the script.")
    module: ModulePath = Field(title="Module", description="The TrainingModule, as package.module:attribute.")
    module_args: Arguments = Field({}, title="Module arguments", description="Keyword arguments of the module.")
    data: ModulePath = Field(title="Data", description="The DataModule, as package.module:attribute.")
    data_args: Arguments = Field({}, title="Data arguments", description="Keyword arguments of the data module.")
    weights: Place | None = Field(
        None,
        title="Weights",
        description="Weights that a fresh run starts from: the best or last folder of another run.",
    )
    seed: Seed = Field(
        0, title="Seed", description="Seeds Python, numpy and torch in every process, and the order of samples."
    )
    world: WorldOptions = Field(
        WorldOptions.model_validate({}), title="World", description="The processes that train together."
    )
    trainer: Annotated[TrainerOptions, AfterValidator(_check_end)] = Field(
        title="Training", description="How long and how the module trains."
    )
    snapshots: SnapshotOptions | None = Field(
        SnapshotOptions.model_validate({}),
        title="Snapshots",
        description="When and where the full state is written; no snapshots if empty.",
    )
    monitor: MonitorOptions | None = Field(
        None, title="Monitor", description="The logged value that decides which weights are best."
    )
    callbacks: tuple[CallbackOptions, ...] = Field(
        (),
        title="Callbacks",
        description="Callbacks, in the order in which they are called; snapshots hold their state.",
    )
    loggers: Loggers = Field(
        (),
        title="Loggers",
        description="Trackers that receive the metric log; each is a name, or a name with arguments.",
    )
    nightly: NightlyOptions = Field(
        NightlyOptions.model_validate({}),
        title="Nightly",
        description="When the challenger of a night replaces the champion.",
    )
    retries_without_progress: Annotated[int, Field(ge=0, strict=True)] = Field(
        3,
        title="Retries without progress",
        description="Largest number of consecutive retries without a newer snapshot.",
        validation_alias=AliasChoices("retries_without_progress", "retries"),  # its name until 0.1
    )
    resources: dict[str, Annotated[int, Field(gt=0, strict=True)]] = Field(
        {},
        title="Resources",
        description="Slots of Prefect's global concurrency limits that each attempt holds, such as gpus: 2.",
    )
    accept_change: tuple[IdentityKey, ...] = Field(
        (),
        title="Accepted changes",
        description="Parts of the run's identity that may differ from its snapshot.",
    )
    folder: Place = Field(
        "", title="Code folder", description="Folder to import from in every rank; the job file's own if empty."
    )

    @model_validator(mode="before")
    @classmethod
    def _script_needs_less(cls, document: Any) -> Any:
        return with_script_defaults(document)

    @model_validator(mode="after")
    def _fits_its_script(self) -> "TrainingJob":
        if faults := script_faults(self):
            raise ValueError("; ".join(faults))
        return self

    @model_validator(mode="after")
    def _logs_what_is_kept(self) -> "TrainingJob":
        if self.loggers and self.snapshots is None:
            raise ValueError(
                "loggers receive rows when snapshots are committed, but snapshots is null: set it, or leave loggers out"
            )
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> "TrainingJob":
        world = self.world
        given = world.strategy, world.strategy_args, self.trainer.precision, world.ranks
        choice = StrategyRequest(*given, lanes=world.lanes)
        if faults := [*(conflicts(choice) if world.strategy in STRATEGIES else []), *lane_conflicts(choice)]:
            raise ValueError("; ".join(faults))
        return self

    @classmethod
    def load(cls, path: Path | str, overrides: Iterable[str] = (), accepted: Sequence[str] = ()) -> "TrainingJob":
        """Return the job in the YAML file `path`, its paths made absolute against that file.

        Args:
            path: the file.
            overrides: choices set from outside, such as "trainer.max_epochs=2"; values are YAML.
            accepted: changes accepted from outside, beside those that the file accepts.

        Raises:
            JobError: with every fault of the file and of the overrides at once.
        """
        # Ranks are given a job as JSON: they read no YAML.
        from midstride.engine.config.yaml_file import apply_overrides, read_mapping

        path = Path(path)
        document, faults = read_mapping(path)
        if faults:
            raise JobError.of(path, faults)
        faults = apply_overrides(document, overrides)
        if accepted and isinstance(there := document.get("accept_change", []), list):
            document["accept_change"] = [*there, *accepted]
        job: TrainingJob | None = None
        try:
            job = cls.model_validate(document)
        except ValidationError as error:
            faults += validation_errors(error, cls)
        if job is None or faults:
            raise JobError.of(path, faults)
        return job.resolved(path.absolute().parent)

    def resolved(self, folder: Path) -> "TrainingJob":
        """Return this job with every path made absolute against `folder`.

        Those are the store, the code folder, and arguments that start with "./" or "../": only these
        are surely paths.
        """
        snapshots = self.snapshots
        return self.model_copy(
            update={
                "folder": absolute_url(self.folder or ".", folder),
                "snapshots": snapshots and snapshots.model_copy(update={"url": absolute_url(snapshots.url, folder)}),
                "weights": self.weights and absolute_url(self.weights, folder),
                "args": tuple(_resolve([*self.args], folder)),
                "module_args": _resolve(self.module_args, folder),
                "data_args": _resolve(self.data_args, folder),
                "callbacks": tuple(_resolve_args(callback, folder) for callback in self.callbacks),
                "loggers": tuple(_resolve_args(logger, folder) for logger in self.loggers),
            }
        )

    @property
    def code(self) -> str:
        """The code that trains, for people: the script, or module and data."""
        return self.script or f"{self.module}, {self.data}"

    @property
    def store_url(self) -> str:
        """URL of all runs of this job. A run has a folder even without snapshots."""
        url = (self.snapshots or SnapshotOptions.model_validate({})).url
        return absolute_url(url, self.folder or ".").rstrip("/")

    def run_url(self, run: str) -> str:
        """Return where the run called `run` lives.

        Raises:
            JobError: the name cannot be that of a folder.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run):
            raise JobError(f"run {run!r}: letters, digits and . _ - are needed, a letter or digit first")
        if len(run) > _LONGEST:
            raise JobError(f"run {run[:20]}...: has {len(run)} characters, and a folder's name at most {_LONGEST}")
        return f"{self.store_url}/{run}"

    @property
    def store_terms(self) -> StoreOptions:
        """Store options of a launcher or monitor: they need an answer soon."""
        return StoreOptions(lease=self.snapshots.lease) if self.snapshots else StoreOptions()


def _resolve_args(plugin: Plugin, folder: Path) -> Plugin:
    return plugin.model_copy(update={"args": _resolve(plugin.args, folder)})


def _resolve(value: Any, folder: Path) -> Any:
    return map_texts(value, lambda text: absolute_url(text, folder) if text.startswith(("./", "../")) else text)
