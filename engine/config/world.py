"""The processes that train together, as given by a job.

Importing this needs no torch: an orchestrator reads jobs without loading it.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from midstride.engine.config.arguments import Arguments
from midstride.engine.config.clusters import CLUSTERS, on_args_errors
from midstride.engine.config.import_paths import import_path
from midstride.engine.config.json_schema import class_schema
from midstride.engine.config.lanes import lane_conflicts
from midstride.engine.config.launchers import LAUNCHERS
from midstride.engine.config.lightning_names import LIGHTNING_STRATEGIES, STRATEGY_ALIASES
from midstride.engine.config.nodes import Nodes
from midstride.engine.config.options import Count, Options
from midstride.engine.config.strategies import STRATEGIES, conflicts, default_launcher
from midstride.engine.config.strategy_spec import StrategyRequest, StrategySpec

__all__ = ["WorldOptions"]

#: the strategies of a job: its launcher starts the ranks, so those that start them from a script have no place here
_STRATEGIES = sorted(name for name, spec in STRATEGIES.items() if spec.start not in ("spawn", "fork"))


def _known_strategy(name: str) -> str:
    name = STRATEGY_ALIASES.get(name, name)
    if name in _STRATEGIES:
        return name
    if name in STRATEGIES:
        raise ValueError(f"{name} starts its processes from a script or a notebook; in a job use ddp")
    if ":" in name:
        return import_path(name)
    if name in LIGHTNING_STRATEGIES:
        raise ValueError(f"there is no strategy {name!r} here: {LIGHTNING_STRATEGIES[name]}")
    raise ValueError(f"unknown strategy {name!r}: choose one of {', '.join(_STRATEGIES)}")


def _known_launcher(name: str) -> str:
    if name in LAUNCHERS:
        return name
    if ":" in name:
        return import_path(name)
    known = ", ".join(LAUNCHERS)
    raise ValueError(f'unknown launcher {name!r}: choose one of {known}, or your own as "package.module:Class"')


def _known_cluster(name: str) -> str:
    if name in ("join", *CLUSTERS):
        return name
    raise ValueError(f"unknown scheduler {name!r}: choose one of {_LIST}")


def _text(value: Any) -> Any:
    """`nodes: 1` means the text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_LIST = ", ".join(("join", *CLUSTERS))
#: host:slots of each, by commas
_HOSTS = r"^[A-Za-z0-9._-]+:[1-9][0-9]*(,[A-Za-z0-9._-]+:[1-9][0-9]*)*$"
#: a number, or the least and the most
_NODES = r"^[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?$"
#: host:port; port 0 is any that is free
_ADDRESS = r"^[A-Za-z0-9._-]+:[0-9]{1,5}$"

TimeoutS = Annotated[float, Field(strict=True, gt=0)] | None  # None: wait for ever


GpuCount = Annotated[int, Field(ge=-1, strict=True)]
GpuIndices = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]

ClusterName = Annotated[str, AfterValidator(_known_cluster), Field(json_schema_extra={"enum": ["join", *CLUSTERS]})]
LauncherName = Annotated[str, AfterValidator(_known_launcher), WithJsonSchema(class_schema([*LAUNCHERS]))]


class WorldOptions(Options):
    """The processes that train together."""

    strategy: Annotated[str, AfterValidator(_known_strategy), WithJsonSchema(class_schema(_STRATEGIES))] = Field(
        "single",
        title="Strategy",
        description='How one module trains on many devices: single, ddp, ..., or your own as "package.module:Class".',
    )
    strategy_args: Arguments = Field({}, title="Strategy arguments", description="Keyword arguments of the strategy.")
    lanes: Count | None = Field(
        None,
        title="Lanes",
        description="Cut every batch into this many equal parts, a power of two: any number of processes that divides "
        "it then computes the same bits. batch_size counts the samples of one part.",
    )
    global_batch_size: Count | None = Field(
        None,
        title="Global batch size",
        description="Samples in a training batch over all ranks, which share them equally; it overrides the loader's "
        "batch_size. A run without lanes needs it if the number of nodes varies.",
    )
    processes: Count = Field(1, title="Processes", description="Ranks on each node.")
    devices: Count | None = Field(
        None, title="Devices", description="Devices over which each process splits its batches, with dp and ddp2."
    )
    accelerator: Literal["auto", "cpu", "gpu"] = Field(
        "auto",
        title="Accelerator",
        description="auto: GPUs if there are any. Each process has one, or as many as devices says.",
    )
    gpus: GpuCount | GpuIndices | None = Field(
        None,
        title="GPUs",
        description="GPUs of each machine, for all its processes: the first n, -1 for all, or a list of indices.",
    )
    auto_select_gpus: bool = Field(
        False, title="Free GPUs", description="Choose GPUs that are not in use, as many as the processes need."
    )
    nodes: Annotated[str, Field(pattern=_NODES), BeforeValidator(_text)] = Field(
        "1",
        title="Nodes",
        description='Number of machines: "4"; with lanes or global_batch_size also a range, "1:4".',
    )
    on: ClusterName = Field(
        "join",
        title="Nodes from",
        description="Scheduler that starts the nodes: slurm, ray or kubernetes; join if you run `midstride join` on "
        "each.",
    )
    on_args: Arguments = Field(
        {}, title="Arguments for them", description="Arguments of the scheduler, such as partition and time."
    )
    rendezvous: Annotated[str, Field(pattern=_ADDRESS)] | None = Field(
        None,
        title="Rendezvous",
        description="HOST:PORT of the launching machine: the address for `midstride join`. If empty and a scheduler "
        "starts the nodes, a free port of this machine.",
    )
    node_timeout_s: Annotated[float, Field(strict=True, gt=0)] = Field(
        5.0, title="Node time-out", description="Seconds without a sign of life after which a node is left out."
    )
    grow_after_s: Annotated[float, Field(strict=True, ge=0)] | None = Field(
        60.0,
        title="Grow after",
        description="Seconds of training before waiting nodes are admitted, after a snapshot; never if empty.",
    )
    hang_timeout_s: TimeoutS = Field(
        600.0,
        title="Hang",
        description="Seconds without a batch before the ranks are ended and retried; no limit if empty.",
    )
    startup_timeout_s: TimeoutS = Field(
        1800.0,
        title="Hang at the start",
        description="The same limit until the first step: imports, set-up, compilation.",
    )
    validation_timeout_s: TimeoutS = Field(
        1800.0,
        title="Hang in validation",
        description="The same limit for a batch of validation, and at the end of an epoch.",
    )
    preemption_notice: Literal["aws", "gcp", "azure"] | None = Field(
        None,
        title="Preemption notice",
        description="Cloud of a spot machine: a snapshot is taken when it announces a preemption.",
    )
    hosts: Annotated[str, Field(pattern=_HOSTS)] | None = Field(
        None,
        title="Hosts",
        description="Hosts for horovodrun, each as host:slots, such as a:4,b:4; ranks fill them in this order. "
        "This machine alone if empty.",
    )
    launcher: LauncherName | None = Field(
        None,
        title="Launcher",
        description="Program that starts the processes: torchrun, spawn, inline, horovodrun, join (machines join), "
        "or your own "
        'as "package.module:Class". If empty, it follows from nodes and strategy.',
    )

    @property
    def launched_by(self) -> str:
        """The launcher's name, chosen or following from the nodes and the strategy."""
        others = self.nodes != "1" or self.on != "join"
        return self.launcher or ("join" if others else default_launcher(self.strategy))

    @property
    def machines(self) -> Nodes:
        """The nodes, and which numbers of them will do."""
        return Nodes.parse(self.nodes, processes=self.processes, lanes=self.lanes, batch=self.global_batch_size)

    @property
    def ranks(self) -> int:
        """Maximum number of ranks."""
        return max(self.machines.usable, default=1) * self.processes

    @model_validator(mode="after")
    def _fits(self) -> "WorldOptions":
        spec = STRATEGIES.get(self.strategy)
        request = StrategyRequest(self.strategy, self.strategy_args, ranks=self.ranks, lanes=self.lanes)
        faults = conflicts(request) if spec is not None else []
        faults += self._nodes_faults(spec)
        faults += lane_conflicts(request)
        if spec is not None and self.devices is not None and not spec.splits_batches:
            faults.append(f"devices is for dp and ddp2; with {self.strategy} set processes: {self.devices}")
        faults += self._gpu_faults(spec)
        if faults:
            raise ValueError("; ".join(faults))
        if self.launched_by == "inline" and self.processes > 1:
            raise ValueError(f"launcher inline starts one process, not {self.processes}; leave it out, or use spawn")
        self._fits_horovodrun(spec)
        return self

    def _nodes_faults(self, spec: StrategySpec | None) -> list[str]:
        """Return faults of settings for nodes that join."""
        faults, joined = self.machines.errors, self.launched_by == "join"
        if self.nodes != "1" and not joined:
            faults.append(
                f"nodes {self.nodes} with launcher {self.launched_by}, which starts one machine: leave it out"
            )
        if joined and spec is not None and spec.launcher != "torchrun":
            faults.append(f"nodes that join with strategy {self.strategy}: {spec.launcher} starts it: use ddp")
        if self.on != "join" and not joined:
            faults.append(
                f"on {self.on} with launcher {self.launched_by}, which starts the ranks on this machine: leave it out"
            )
        faults += on_args_errors(self.on, self.on_args)
        if joined and self.on == "join" and self.rendezvous is None:
            faults.append(
                "nodes that join need an address: set rendezvous: HOST:PORT, by which they reach this machine, such as "
                "rendezvous: head:29400"
            )
        if not joined:
            faults += [
                f'{name} {getattr(self, name)} is for nodes that join: set nodes: "2", or leave it out'
                for name in ("rendezvous", "node_timeout_s", "grow_after_s")
                if getattr(self, name) != type(self).model_fields[name].default
            ]
        return faults

    def _gpu_faults(self, spec: StrategySpec | None) -> list[str]:
        """Return faults of `gpus` beside the other settings."""
        if self.gpus is None:
            return []
        if self.gpus == 0:
            return ["0 gpus are the CPU: set accelerator: cpu"]
        if self.accelerator == "cpu":
            return [f"gpus is {self.gpus}, and accelerator cpu: leave one out"]
        if self.devices is not None:
            return [f"gpus is {self.gpus} and devices {self.devices}, which say the same thing: leave one out"]
        if self.auto_select_gpus and isinstance(self.gpus, list):
            return [
                f"auto_select_gpus chooses among GPUs, and gpus {self.gpus} names them: give a number, or leave it out"
            ]
        count = len(self.gpus) if isinstance(self.gpus, list) else self.gpus
        if count == -1 or (spec is not None and spec.splits_batches and count % self.processes == 0):
            return []
        if count == self.processes:
            return []
        return [
            f"gpus {self.gpus} are {count} for {self.processes} processes: each has one GPU, with dp and ddp2 as many "
            "as it is given"
        ]

    @property
    def of_one_process(self) -> "WorldOptions":
        """The world of one process that has the first of these devices."""
        gpus = self.gpus[:1] if isinstance(self.gpus, list) else None
        given = {"lanes": self.lanes, "accelerator": self.accelerator, "gpus": gpus}
        return WorldOptions.model_validate({**given, "auto_select_gpus": self.auto_select_gpus and gpus is None})

    def _fits_horovodrun(self, spec: StrategySpec | None) -> None:
        launcher = self.launched_by
        if spec is not None and "horovodrun" in (launcher, spec.launcher) and launcher != spec.launcher:
            raise ValueError(f"launcher {launcher} does not go with strategy {self.strategy}: leave it out")
        if self.hosts is None:
            return
        if launcher != "horovodrun":
            raise ValueError(
                f"hosts is for horovodrun, and strategy {self.strategy} is started by {launcher}: leave hosts out"
            )
        slots = sum(int(host.rpartition(":")[2]) for host in self.hosts.split(","))
        if slots < self.processes:
            raise ValueError(
                f"hosts {self.hosts} have {slots} slots, and there are {self.processes} processes: make them equal"
            )
