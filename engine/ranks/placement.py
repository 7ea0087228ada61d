"""Where a Trainer trains: its strategy, its world, its devices, and who has to start the ranks."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from midstride.engine.config.strategies import STRATEGIES, Choice, Row, Start, conflicts
from midstride.engine.ranks.gpus import free_gpus, parse_devices, parse_gpus
from midstride.engine.ranks.tpus import parse_tpu_cores
from midstride.engine.slurm import is_one_task
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.build import build_strategy
from midstride.engine.world import World

__all__ = ["UNSAID", "Machine", "Placement", "Wishes", "place"]

#: `gpus` was not given: None is a choice, the CPU
UNSAID: Any = object()


@dataclass(frozen=True)
class Wishes:
    """What a Trainer was asked for; see its arguments."""

    strategy: str | Strategy | None = None
    strategy_args: Mapping[str, Any] = field(default_factory=dict)
    devices: Any = None
    gpus: Any = UNSAID
    num_nodes: int | None = None
    auto_select_gpus: bool = False
    precision: str = "32"
    tpu_cores: Any = None


@dataclass(frozen=True)
class Machine:
    """What is there.

    Args:
        gpus: how many, as far as CUDA_VISIBLE_DEVICES lets this process see.
        environment: of this process.
        interactive: there is no script that could be run again.
        cuda_in_use: this process has initialised CUDA.
        free_gpus: finds the free GPUs.
    """

    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    interactive: bool = False
    cuda_in_use: bool = False
    free_gpus: Callable[[], list[int]] = free_gpus

    @classmethod
    def here(cls) -> "Machine":
        """Return what is here."""
        script = getattr(sys.modules["__main__"], "__file__", None)  # "<stdin>" where the code is piped in
        interactive = script is None or not Path(script).exists()
        return cls(torch.cuda.device_count(), os.environ, interactive, torch.cuda.is_initialized())


@dataclass(frozen=True)
class Placement:
    """Where a Trainer trains.

    Args:
        strategy: attached to world and devices.
        world: this process among all of them; it is rank 0 of a world that has still to be started by the script.
        start: who has to start the ranks before they can meet.
        ranks: how many are to be started.
        gpus: of this machine, for all of them.
        words: what a person should know about it.
    """

    strategy: Strategy
    world: World
    start: Start
    ranks: int
    gpus: list[int]
    words: str


def place(asked: Wishes, machine: Machine) -> tuple[Placement, list[str]]:
    """Return where a Trainer trains, and every fault of what it was asked for: with one, the place is not to be used.

    Raises:
        StrategyUnavailable: no such strategy, or its library is not installed.
    """
    world = World.from_environment(machine.environment)
    faults: list[str] = []
    asked = _on_tpu(asked, faults)
    own = _own_strategy(asked, faults)
    chosen = STRATEGIES.get(own.name if own is not None else str(asked.strategy))
    gpus, count = _devices(asked, machine, faults, own_devices=chosen is not None and bool(chosen.devices))
    name = own.name if own is not None else str(asked.strategy or _by_itself(world, count, machine))
    if name not in STRATEGIES and own is None:
        build_strategy(name)  # says which there are
    row = STRATEGIES.get(name) or Row("", "script")
    to_start = _to_start(row, world, count)
    faults = faults or _world_faults(asked, row, world, count)
    if name in STRATEGIES:
        choice = Choice(
            strategy=name,
            options={} if own is not None else asked.strategy_args,
            precision=asked.precision,
            ranks=max(to_start, world.size),
            accelerator="cuda" if gpus else "cpu",
            launcher=world.launcher,
            interactive=machine.interactive,
            cuda_in_use=machine.cuda_in_use and bool(gpus),
        )
        faults += conflicts(choice)
    devices = _of_this_rank(asked, row, world, gpus, count, machine.gpus, faults)
    if faults:  # what stands in its place need not be here
        own = build_strategy("single")
    strategy = own if own is not None else build_strategy(name, asked.strategy_args)
    start: Start = row.start if to_start > 1 else "none"
    if start == "script":
        world = World(size=to_start, local_size=to_start)
    strategy.attach(world, devices)
    words = _words(asked, name, row, max(world.size, to_start), devices, machine)
    return Placement(strategy, world, start, to_start, gpus, words), faults


def _on_tpu(asked: Wishes, faults: list[str]) -> Wishes:
    """What `tpu_cores` says, in the words of strategy xla."""
    cores, strategy = asked.tpu_cores, asked.strategy
    if cores is None:
        return asked
    try:
        count, core = parse_tpu_cores(cores)
    except ValueError as error:
        faults.append(str(error))
        return asked
    if asked.devices is not None or asked.gpus is not UNSAID:
        other = f"devices={asked.devices!r}" if asked.devices is not None else f"gpus={asked.gpus!r}"
        faults.append(f"tpu_cores={cores!r} and {other} both say where to train: leave one out")
    name = strategy.name if isinstance(strategy, Strategy) else strategy or "xla"
    if name != "xla" and ":" not in name:
        faults.append(f"tpu_cores={cores!r} with strategy {name}: TPUs are for strategy xla: leave strategy out")
        return asked
    arguments = dict(asked.strategy_args) if core is None else {**asked.strategy_args, "core": core}
    return replace(asked, strategy=strategy or "xla", strategy_args=arguments, devices=count, gpus=UNSAID)


def _own_strategy(asked: Wishes, faults: list[str]) -> Strategy | None:
    """The strategy that a user made, or of which they gave the import path."""
    given = asked.strategy
    if isinstance(given, Strategy):
        if asked.strategy_args:
            faults.append(
                f"strategy_args={dict(asked.strategy_args)!r} beside a {type(given).__name__} that is made already: "
                "give them where it is made"
            )
        return given
    if given is None or ":" not in given:
        return None
    try:
        return build_strategy(given, asked.strategy_args)
    except TypeError as error:
        faults.append(f"strategy_args: {error}")
        return build_strategy(given)


def _devices(asked: Wishes, machine: Machine, faults: list[str], *, own_devices: bool) -> tuple[list[int], int]:
    """The indices of the GPUs that were asked for, and how many devices that is on a node.

    A strategy with `own_devices` takes no GPU by default.
    """
    try:
        said = [] if asked.gpus is UNSAID else parse_gpus(asked.gpus, machine.gpus)
        if said and asked.devices is not None:
            raise ValueError(f"gpus={asked.gpus!r} and devices={asked.devices!r} say the same thing: leave one out")
        cpu = own_devices or (asked.gpus is not UNSAID and not said)
        gpus, count = (said, len(said)) if said else parse_devices(asked.devices, 0 if cpu else machine.gpus)
    except ValueError as error:
        faults.append(str(error))
        return [], 1
    if asked.auto_select_gpus:
        gpus = _selected(asked, gpus, machine, faults)
    return gpus, count


def _selected(asked: Wishes, gpus: list[int], machine: Machine, faults: list[str]) -> list[int]:
    """As many GPUs as in `gpus`, of those that are free."""
    if chosen := machine.environment.get(World.STARTED):  # by rank 0; its own GPU is no longer free
        return [int(gpu) for gpu in chosen.split(",")]
    given = asked.devices if asked.gpus is UNSAID else asked.gpus
    if isinstance(given, (list, str)) and given != "auto":
        faults.append(f"auto_select_gpus=True chooses among GPUs, and {given!r} names them: give a number of GPUs")
    elif not gpus:
        faults.append("auto_select_gpus=True: there is no GPU to choose here, or none was asked for")
    elif len(free := machine.free_gpus()) < len(gpus):
        faults.append(
            f"auto_select_gpus=True: {len(gpus)} GPUs were asked for, and of the {machine.gpus} here only "
            f"{free} are free: ask for fewer, or wait"
        )
    else:
        return free[: len(gpus)]
    return gpus


def _by_itself(world: World, count: int, machine: Machine) -> str:
    """The strategy when none was asked for.

    What a launcher started may have had more ranks before and may have them again: alone it is the same strategy.
    """
    if world.launcher is None and count > 1:
        return "ddp_notebook" if machine.interactive else "ddp"
    if world.launcher is None and not is_one_task(machine.environment):
        return "single"
    return "horovod" if world.launcher == "horovodrun" else "ddp"


def _to_start(row: Row, world: World, count: int) -> int:
    """How many processes are wanted where no launcher has started any."""
    return 1 if world.launcher is not None or row.splits else count


def _world_faults(asked: Wishes, row: Row, world: World, count: int) -> list[str]:
    """What a launcher started, against what was asked for."""
    faults = []
    nodes = asked.num_nodes
    if nodes is not None and (type(nodes) is not int or nodes < 1):
        faults.append(f"num_nodes: a number of machines is needed, not {nodes!r}")
    elif world.launcher is None and nodes is not None and nodes > 1:
        faults.append(
            f"num_nodes={nodes}: a script starts processes on its own machine only: start it on each of the {nodes} by "
            f"torchrun --nnodes={nodes} --nproc-per-node=..."
        )
    elif world.launcher is not None and nodes is not None and nodes != world.nodes:
        faults.append(f"num_nodes={nodes}, and {world.launcher} started this world on {world.nodes}: leave it out")
    given = asked.devices if asked.gpus is UNSAID else asked.devices or asked.gpus
    if world.launcher is not None and given not in (None, "auto") and not row.splits and count != world.local_size:
        by = "an earlier Trainer" if world.launcher == "midstride" else world.launcher
        faults.append(
            f"{count} devices were asked for ({given!r}), and {by} started {world.local_size} processes on this "
            "machine: leave devices out, or give that number"
        )
    return faults


def _of_this_rank(
    asked: Wishes, row: Row, world: World, gpus: list[int], count: int, available: int, faults: list[str]
) -> list[torch.device]:
    """The devices of this process."""
    parts = count if row.splits else 1
    if not gpus:
        return [torch.device("cpu")] * parts
    asked_for_none = asked.devices in (None, "auto") and asked.gpus is UNSAID
    if world.local_size > 1 and (row.splits or asked_for_none):
        # Each process of a node takes the next ones; a process that sees one GPU was given it for itself.
        gpus = list(range(available)) if available > 1 else [0] * world.local_size * parts
    mine = gpus[world.local_rank * parts : (world.local_rank + 1) * parts]
    if len(mine) < parts:
        faults.append(
            f"{world.local_size} processes with {parts} GPUs each were started on this machine, and it has "
            f"{available}: start fewer, or say gpus=0 for the CPU"
        )
    return [torch.device("cuda", gpu) for gpu in mine] or [torch.device("cpu")]


def _words(asked: Wishes, name: str, row: Row, processes: int, devices: list[torch.device], machine: Machine) -> str:
    """Who trains, and where, in a line."""
    by_itself = asked.strategy is None and processes > 1
    who = f"{name} (default: several devices and no strategy given)" if by_itself else name
    where = "GPUs" if devices[0].type == "cuda" else "the CPU" if machine.gpus else "the CPU (there is no GPU here)"
    parts = f", each batch in {len(devices)} parts" if len(devices) > 1 else ""
    return f"{who}, {processes} process{'es' if processes > 1 else ''} on {row.devices or where}{parts}"
