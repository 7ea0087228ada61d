"""The training job: every choice that decides a run, from one YAML file, all faults found at once.

Importing this needs no torch: an orchestrator reads jobs without loading it.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from midstride.engine.errors import JobError
from midstride.engine.imports import call_with, load_attribute
from midstride.engine.jobfile import apply_overrides, faults_of, read_mapping
from midstride.engine.launchers import default_launcher
from midstride.engine.options import Count, MonitorOptions, Options, SnapshotOptions, TrainerOptions
from midstride.engine.strategies import STRATEGIES

if TYPE_CHECKING:
    from midstride.engine.module import DataModule, TrainingModule

__all__ = ["TrainingJob", "WorldOptions"]

Built = TypeVar("Built")


def _known_strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise ValueError(f"there is no strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}")
    return name


def _one_node(nodes: str) -> str:
    if nodes != "1":
        raise ValueError(f'a world on several nodes cannot be started from here yet: "1" is needed, not {nodes!r}')
    return nodes


def _importable(spec: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", spec):
        raise ValueError(f'"package.module:attribute" is needed, such as model:Classifier, not {spec!r}')
    return spec


def _ends(trainer: TrainerOptions) -> TrainerOptions:
    if trainer.max_epochs is None and trainer.max_steps is None:
        raise ValueError("say max_epochs or max_steps: the training would never end")
    return trainer


def _text(value: Any) -> Any:
    """`nodes: 1` and `precision: 32` mean the text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
ImportPath = Annotated[str, AfterValidator(_importable)]


IdentityKey = Literal[
    "module",
    "module_args",
    "data",
    "data_args",
    "seed",
    "global_batch_size",
    "batch_size",
    "samples",
    "drop_last",
    "shuffle",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "val_check_interval",
    "limit_train_batches",
    "limit_val_batches",
    "use_distributed_sampler",
    "precision",
    "strategy",
]


class WorldOptions(Options):
    """Which processes train together."""

    strategy: Annotated[str, AfterValidator(_known_strategy)] = Field(
        "single",
        title="Strategy",
        description="How one module trains on many devices.",
        json_schema_extra={"enum": [*sorted(STRATEGIES)]},
    )
    processes: Count = Field(1, title="Processes", description="Ranks on each node.")
    nodes: Annotated[str, BeforeValidator(_text), AfterValidator(_one_node)] = Field(
        "1", title="Nodes", description="How many machines."
    )
    launcher: Literal["inline", "torchrun"] | None = Field(
        None, title="Launcher", description="Who starts the processes; follows from the strategy if empty."
    )

    @property
    def launched_by(self) -> str:
        """The launcher's name, chosen or following from the strategy."""
        return self.launcher or default_launcher(self.strategy)

    @model_validator(mode="after")
    def _fits(self) -> "WorldOptions":
        if self.strategy == "single" and self.processes > 1:
            raise ValueError(f"strategy single has one process, not {self.processes}; for more choose ddp")
        if self.launched_by == "inline" and self.processes > 1:
            raise ValueError(f"launcher inline starts one process, not {self.processes}; leave it out, or say torchrun")
        return self


class TrainingJob(Options):
    """What is trained, on what, how and where: a run is a job and a name."""

    name: str = Field(title="Name", description="Of the job.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    module: ImportPath = Field(title="Module", description="package.module:attribute of the TrainingModule.")
    module_args: dict[str, Any] = Field({}, title="Module arguments", description="Passed to the module by name.")
    data: ImportPath = Field(title="Data", description="package.module:attribute of the DataModule.")
    data_args: dict[str, Any] = Field({}, title="Data arguments", description="Passed to the data module by name.")
    seed: Seed = Field(0, title="Seed", description="Of everything random.")
    world: WorldOptions = Field(
        WorldOptions.model_validate({}), title="World", description="Which processes train together."
    )
    trainer: Annotated[TrainerOptions, AfterValidator(_ends)] = Field(title="Training", description="How long and how.")
    snapshots: SnapshotOptions | None = Field(
        SnapshotOptions.model_validate({}),
        title="Snapshots",
        description="When the whole state is written; none are taken if empty.",
    )
    monitor: MonitorOptions | None = Field(None, title="Monitor", description="Which value decides what is best.")
    retries: Annotated[int, Field(ge=0, strict=True)] = Field(
        3, title="Retries", description="Attempts in a row without a newer snapshot that are forgiven."
    )
    accept_change: tuple[IdentityKey, ...] = Field(
        (),
        title="Accepted changes",
        description="What may differ from the run's snapshot, although it decides the run.",
    )
    folder: str = Field("", title="Code folder", description="Importable in every rank; the job file's own if empty.")

    @model_validator(mode="before")
    @classmethod
    def _numbers_as_text(cls, document: Any) -> Any:
        trainer = document.get("trainer") if isinstance(document, dict) else None
        if isinstance(trainer, dict) and "precision" in trainer:
            return {**document, "trainer": {**trainer, "precision": _text(trainer["precision"])}}
        return document

    @classmethod
    def load(cls, path: Path | str, overrides: Iterable[str] = ()) -> "TrainingJob":
        """Return the job in the YAML file `path`, its paths made absolute against that file.

        Args:
            path: the file.
            overrides: choices set from outside, such as "trainer.max_epochs=2"; values are YAML.

        Raises:
            JobError: with every fault of the file and of the overrides at once.
        """
        path = Path(path)
        document, faults = read_mapping(path)
        if faults:
            raise JobError.of(path, faults)
        faults = apply_overrides(document, overrides)
        try:
            job = cls.model_validate(document)
        except ValidationError as error:
            faults += faults_of(error, cls)
        if faults:
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
                "folder": _absolute(self.folder or ".", folder),
                "snapshots": snapshots and snapshots.model_copy(update={"url": _absolute(snapshots.url, folder)}),
                "module_args": _resolve(self.module_args, folder),
                "data_args": _resolve(self.data_args, folder),
            }
        )

    @property
    def store_url(self) -> str:
        """Where all runs of this job live; a run has a place also when it takes no snapshots."""
        url = (self.snapshots or SnapshotOptions.model_validate({})).url
        return _absolute(url, Path(self.folder)).rstrip("/")

    def run_url(self, run: str) -> str:
        """Return where the run called `run` lives.

        Raises:
            JobError: the name cannot be that of a folder.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run):
            raise JobError(f"run {run!r}: letters, digits and . _ - are needed, a letter or digit first")
        return f"{self.store_url}/{run}"

    def build_module(self) -> "TrainingModule":
        """Return the job's module, built from its arguments.

        Raises:
            JobError: it cannot be imported, takes other arguments, or is no TrainingModule.
            UserCodeError: importing or building it raises.
        """
        from midstride.engine.module import TrainingModule

        return self._build("module", self.module, self.module_args, TrainingModule)

    def build_data(self) -> "DataModule":
        """Return the job's data module, built from its arguments; raises as `build_module` does."""
        from midstride.engine.module import DataModule

        return self._build("data", self.data, self.data_args, DataModule)

    def _build(self, key: str, spec: str, arguments: dict[str, Any], kind: type[Built]) -> Built:
        where = f"job {self.name}"
        try:
            make = load_attribute(spec, self.folder or Path.cwd(), key)
            built = call_with(make, arguments, spec, f"{key}_args")
        except JobError as error:
            raise JobError.of(where, str(error).splitlines()) from None
        if not isinstance(built, kind):
            fault = f"{key}: {spec} gives a {type(built).__name__}; a {kind.__name__} is needed"
            raise JobError.of(where, [fault])
        return built


def _absolute(path: str, folder: Path) -> str:
    return path if "://" in path else os.path.normpath(folder / path)


def _resolve(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, folder) for item in value]
    return _absolute(value, folder) if isinstance(value, str) and value.startswith(("./", "../")) else value
