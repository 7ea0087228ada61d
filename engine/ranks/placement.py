"""Where a Trainer trains: its strategy, its world, its devices, and who has to start the ranks."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from midstride.engine.config.lanes import lane_conflicts
from midstride.engine.config.lightning_names import STRATEGY_ALIASES
from midstride.engine.config.strategies import STRATEGIES, conflicts
from midstride.engine.config.strategy_spec import Start, StrategyRequest, StrategySpec
from midstride.engine.errors import StrategyUnavailable
from midstride.engine.ranks.devices import UNSET, DeviceRequest, Hardware, devices_of_machine, devices_of_rank
from midstride.engine.ranks.tpus import parse_tpu_cores
from midstride.engine.slurm import is_one_task
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.build import build_strategy
from midstride.engine.world import World

__all__ = ["Placement", "resolve_placement"]


@dataclass(frozen=True)
class Placement:
    """Where a Trainer trains.

    Args:
        strategy: attached to world and devices.
        world: this process among all of them; it is rank 0 of a world that has still to be started by the script.
        start: who has to start the ranks before they can meet.
        ranks: how many are to be started.
        gpus: of this machine, for all of them.
        summary: strategy, processes and devices, in a line.
    """

    strategy: Strategy
    world: World
    start: Start
    ranks: int
    gpus: list[int]
    summary: str


def resolve_placement(request: DeviceRequest, hardware: Hardware) -> tuple[Placement, list[str]]:
    """Return where a Trainer trains, and every fault of what it was asked for; with one, the placement is not used.

    Raises:
        StrategyUnavailable: no such strategy, or its library is not installed.
    """
    world = World.from_environment(hardware.environment)
    request, tpu_faults = _on_tpu(_resolve_alias(request))
    own, strategy_faults = _own_strategy(request)
    named = own.name if own is not None else str(request.strategy)
    chosen = STRATEGIES.get(named) or StrategySpec("", "subprocess")
    machine, device_faults = devices_of_machine(request, hardware, world, chosen)
    gpus, count = machine.gpus, machine.count
    name = own.name if own is not None else str(request.strategy or _default_strategy(world, count, hardware))
    if name not in STRATEGIES and own is None:
        build_strategy(name)  # says which there are
    spec = STRATEGIES.get(name) or StrategySpec("", "subprocess")
    to_start = _ranks_to_start(spec, world, count)
    faults = [*tpu_faults, *strategy_faults, *device_faults] or _world_errors(request, spec, world, count)
    forks = spec.start == "fork" and world.launcher is None
    choice = StrategyRequest(
        strategy=name if own is None else type(own).__name__,
        options={} if own is not None else request.strategy_args,
        precision=request.precision,
        ranks=max(to_start, world.size),
        accelerator="cuda" if gpus else "cpu",
        launcher=world.launcher,
        interactive=hardware.interactive,
        cuda_in_use=bool(gpus) and (hardware.cuda_in_use or (forks and hardware.cannot_fork())),
        lanes=request.lanes,
    )
    faults += lane_conflicts(choice)
    if name in STRATEGIES:
        faults += conflicts(replace(choice, strategy=name))
    devices, rank_faults = devices_of_rank(request, hardware, world, spec, machine)
    if faults := faults or rank_faults:  # what is used instead need not be here
        own = build_strategy("single")
    strategy = own if own is not None else build_strategy(name, request.strategy_args, request.lanes)
    start: Start = spec.start if to_start > 1 else "none"
    if start == "subprocess":
        world = World(size=to_start, local_size=to_start)
    strategy.attach(world, devices)
    summary = _summary(request, name, spec, max(world.size, to_start), devices, hardware)
    return Placement(strategy, world, start, to_start, gpus, summary), faults


def _resolve_alias(request: DeviceRequest) -> DeviceRequest:
    """Return what was asked for, with a strategy of Lightning's under the name it has here.

    Raises:
        StrategyUnavailable: it is an object of another library.
    """
    given: Any = request.strategy
    if given is None or isinstance(given, Strategy):
        return request
    if not isinstance(given, str):
        raise StrategyUnavailable(
            f"strategy is a {type(given).__name__} of {type(given).__module__.partition('.')[0]}: say the name of one "
            f"({', '.join(sorted(STRATEGIES))}), and its options by strategy_args"
        )
    name = STRATEGY_ALIASES.get(given, given)
    return replace(request, strategy=None if name == "auto" else name)


def _on_tpu(request: DeviceRequest) -> tuple[DeviceRequest, list[str]]:
    """Return what was asked for with `tpu_cores` as options of strategy xla, and what is wrong with `tpu_cores`."""
    cores, strategy = request.tpu_cores, request.strategy
    if cores is None:
        return request, []
    try:
        count, core = parse_tpu_cores(cores)
    except ValueError as error:
        return request, [str(error)]
    faults = []
    if request.devices is not None or request.gpus is not UNSET:
        other = f"devices={request.devices!r}" if request.devices is not None else f"gpus={request.gpus!r}"
        faults.append(f"tpu_cores={cores!r} and {other} both say where to train: leave one out")
    name = strategy.name if isinstance(strategy, Strategy) else strategy or "xla"
    if name != "xla" and ":" not in name:
        faults.append(f"tpu_cores={cores!r} with strategy {name}: TPUs are for strategy xla: leave strategy out")
        return request, faults
    arguments = dict(request.strategy_args) if core is None else {**request.strategy_args, "core": core}
    request = replace(request, strategy=strategy or "xla", strategy_args=arguments, devices=count, gpus=UNSET)
    return request, faults


def _own_strategy(request: DeviceRequest) -> tuple[Strategy | None, list[str]]:
    """Return the strategy that a user made, or of which they gave the import path, and what is wrong with its options.

    It is None where the strategy is one of ours.
    """
    given = request.strategy
    if isinstance(given, Strategy):
        if not request.strategy_args:
            return given, []
        return given, [
            f"strategy_args={dict(request.strategy_args)!r} beside a {type(given).__name__} that is made already: "
            "give them where it is made"
        ]
    if given is None or ":" not in given:
        return None, []
    try:
        return build_strategy(given, request.strategy_args), []
    except TypeError as error:
        return build_strategy(given), [f"strategy_args: {error}"]


def _default_strategy(world: World, count: int, hardware: Hardware) -> str:
    """Return the name of the strategy when none was asked for.

    What a launcher started may have had more ranks before and may have them again: alone it is the same strategy.
    """
    if world.launcher is None and count > 1:
        return "ddp_notebook" if hardware.interactive else "ddp"
    if world.launcher is None and not is_one_task(hardware.environment):
        return "single"
    return "horovod" if world.launcher == "horovodrun" else "ddp"


def _ranks_to_start(spec: StrategySpec, world: World, count: int) -> int:
    """Return how many processes are to be started; 1 where a launcher has started them, or one process is enough."""
    return 1 if world.launcher is not None or spec.splits_batches else count


def _world_errors(request: DeviceRequest, spec: StrategySpec, world: World, count: int) -> list[str]:
    """Return where what a launcher started differs from what was asked for."""
    faults = []
    nodes = request.num_nodes
    if nodes is not None and (type(nodes) is not int or nodes < 1):
        faults.append(f"num_nodes: a number of machines is needed, not {nodes!r}")
    elif world.launcher is None and nodes is not None and nodes > 1:
        faults.append(
            f"num_nodes={nodes}: a script starts processes on its own machine only: start it on each of the {nodes} by "
            f"torchrun --nnodes={nodes} --nproc-per-node=..."
        )
    elif world.launcher is not None and nodes is not None and nodes != world.nodes:
        faults.append(f"num_nodes={nodes}, and {world.launcher} started this world on {world.nodes}: leave it out")
    given = request.devices if request.gpus is UNSET else request.devices or request.gpus
    if (
        world.launcher is not None
        and given not in (None, "auto")
        and not spec.splits_batches
        and count != world.local_size
    ):
        by = "an earlier Trainer" if world.launcher == "midstride" else world.launcher
        faults.append(
            f"{count} devices were asked for ({given!r}), and {by} started {world.local_size} processes on this "
            "machine: leave devices out, or give that number"
        )
    return faults


def _summary(
    request: DeviceRequest,
    name: str,
    spec: StrategySpec,
    processes: int,
    devices: list[torch.device],
    hardware: Hardware,
) -> str:
    """Return in a line which strategy trains, in how many processes, and where."""
    by_itself = request.strategy is None and processes > 1
    who = f"{name} (default: several devices and no strategy given)" if by_itself else name
    where = "GPUs" if devices[0].type == "cuda" else "the CPU" if hardware.gpus else "the CPU (there is no GPU here)"
    chunks = f", each batch in {len(devices)} parts" if len(devices) > 1 else ""
    lanes = "" if request.lanes is None else f", {request.lanes} lanes"
    return f"{who}, {processes} process{'es' if processes > 1 else ''} on {spec.devices or where}{lanes}{chunks}"
