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
from midstride.engine.snapshots.store import Terms
from midstride.engine.strategies.table import STRATEGIES, Choice, Row, conflicts

if TYPE_CHECKING:
    from midstride.engine.module import DataModule, TrainingModule

__all__ = ["TrainingJob", "WorldOptions"]

Built = TypeVar("Built")


#: the strategies of a job: its launcher starts the ranks, so those that start them from a script have no place here
_STRATEGIES = sorted(name for name, row in STRATEGIES.items() if row.start not in ("spawn", "fork"))


def _known_strategy(name: str) -> str:
    if name in _STRATEGIES:
        return name
    if name in STRATEGIES:
        raise ValueError(f"{name} starts its processes from a script or a notebook, a job from its launcher: say ddp")
    if ":" in name:
        return _importable(name)
    raise ValueError(f"there is no strategy {name!r}; there are: {', '.join(_STRATEGIES)}")


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
    """`nodes: 1` means the text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


#: host:slots of each, by commas
_HOSTS = r"^[A-Za-z0-9._-]+:[1-9][0-9]*(,[A-Za-z0-9._-]+:[1-9][0-9]*)*$"

TimeoutS = Annotated[float, Field(gt=0)] | None  # None: wait for ever
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
ImportPath = Annotated[str, AfterValidator(_importable)]


IdentityKey = Literal[
    "module",
    "module_args",
    "data",
    "data_args",
    "seed",
    "global_batch_size",
    "samples",
    "drop_last",
    "shuffle",
    "sampler",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "val_check_interval",
    "limit_train_batches",
    "limit_val_batches",
    "use_distributed_sampler",
    "rng",
    "precision",
    "strategy",
]


class WorldOptions(Options):
    """Which processes train together."""

    strategy: Annotated[str, AfterValidator(_known_strategy)] = Field(
        "single",
        title="Strategy",
        description='How one module trains on many devices: single, ddp, ..., or your own as "package.module:Class".',
        json_schema_extra={"examples": [*_STRATEGIES]},
    )
    strategy_args: dict[str, Any] = Field({}, title="Strategy arguments", description="Passed to the strategy by name.")
    processes: Count = Field(1, title="Processes", description="Ranks on each node.")
    devices: Count | None = Field(
        None, title="Devices", description="Over which each process splits its batches, with dp and ddp2."
    )
    nodes: Annotated[str, BeforeValidator(_text), AfterValidator(_one_node)] = Field(
        "1", title="Nodes", description="How many machines."
    )
    hang_timeout_s: TimeoutS = Field(
        600.0, title="Hang", description="Seconds without a batch after which the world is ended and retried."
    )
    startup_timeout_s: TimeoutS = Field(
        1800.0, title="Hang at the start", description="The same until the first step: imports, set-up, compilation."
    )
    validation_timeout_s: TimeoutS = Field(
        1800.0,
        title="Hang in validation",
        description="The same for a batch of validation, and at the end of an epoch.",
    )
    hosts: Annotated[str, Field(pattern=_HOSTS)] | None = Field(
        None,
        title="Hosts",
        description="For horovodrun, host:slots of each, such as a:4,b:4; ranks fill them in this order. "
        "Here alone if empty.",
    )
    launcher: Literal["horovodrun", "inline", "spawn", "torchrun"] | None = Field(
        None, title="Launcher", description="Who starts the processes; follows from the strategy if empty."
    )

    @property
    def launched_by(self) -> str:
        """The launcher's name, chosen or following from the strategy."""
        return self.launcher or default_launcher(self.strategy)

    @model_validator(mode="after")
    def _fits(self) -> "WorldOptions":
        row = STRATEGIES.get(self.strategy)
        choice = Choice(self.strategy, self.strategy_args, ranks=self.processes)
        faults = conflicts(choice) if row is not None else []
        if row is not None and self.devices is not None and not row.splits:
            faults.append(f"devices is for dp and ddp2; with {self.strategy} say processes: {self.devices}")
        if faults:
            raise ValueError("; ".join(faults))
        if self.launched_by == "inline" and self.processes > 1:
            raise ValueError(f"launcher inline starts one process, not {self.processes}; leave it out, or say spawn")
        self._fits_horovodrun(row)
        return self

    def _fits_horovodrun(self, row: Row | None) -> None:
        launcher = self.launched_by
        if row is not None and "horovodrun" in (launcher, row.launcher) and launcher != row.launcher:
            raise ValueError(f"launcher {launcher} does not go with strategy {self.strategy}: leave it out")
        if self.hosts is None:
            return
        if launcher != "horovodrun":
            raise ValueError(f"hosts is for horovodrun, and strategy {self.strategy} is started by {launcher}")
        slots = sum(int(host.rpartition(":")[2]) for host in self.hosts.split(","))
        if slots < self.processes:
            raise ValueError(f"hosts {self.hosts} have {slots} slots, and there are {self.processes} processes")


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

    @model_validator(mode="after")
    def _goes_together(self) -> "TrainingJob":
        world = self.world
        if world.strategy in STRATEGIES:
            choice = Choice(world.strategy, world.strategy_args, self.trainer.precision, world.processes)
            if faults := conflicts(choice):
                raise ValueError("; ".join(faults))
        return self

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

    @property
    def store_terms(self) -> Terms:
        """What whoever starts a world, or looks after it, asks of the store: an answer soon."""
        return Terms(lease=self.snapshots.lease) if self.snapshots else Terms()

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
