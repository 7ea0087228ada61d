"""Strategy, process group and devices of a Trainer, and the way its ranks start."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from midstride.engine.config.lanes import lane_conflicts
from midstride.engine.config.lightning_names import STRATEGY_ALIASES
from midstride.engine.config.strategies import STRATEGIES, conflicts
from midstride.engine.config.strategy_spec import Start, StrategyRequest, StrategySpec
from midstride.engine.errors import JobError, StrategyUnavailable, UserError
from midstride.engine.ranks.devices import UNSET, DeviceRequest, Hardware, devices_of_machine, devices_of_rank
from midstride.engine.slurm import is_one_task
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.build_strategy import build_strategy, own_strategy_faults
from midstride.engine.world import World

__all__ = ["Placement", "parse_tpu_cores", "resolve_placement"]


@dataclass(frozen=True)
class Placement:
    """Strategy, ranks and devices of a Trainer.

    Args:
        strategy: attached to world and devices.
        world: rank of this process and number of ranks; rank 0 if the script still has to start the others.
        start: how the Trainer starts the ranks; "none" if they are started, or this process is the only one.
        ranks: number of ranks to start.
        gpus: indices of the GPUs of this machine, for all ranks on it.
        summary: strategy, processes and devices, in one line.
    """

    strategy: Strategy
    world: World
    start: Start
    ranks: int
    gpus: list[int]
    summary: str


def resolve_placement(request: DeviceRequest, hardware: Hardware) -> tuple[Placement, list[str]]:
    """Return a Trainer's placement, and messages on all faults of `request`.

    With faults, do not use the placement.

    Raises:
        StrategyUnavailable: no such strategy, or its library is not installed.
        JobError: a strategy of the user's own does not take its options, or its methods are not those of a strategy.
        UserCodeError: importing or building it raises.
    """
    world = World.from_environment(hardware.environment)
    request, tpu_faults = _resolve_tpu_cores(_resolve_alias(request))
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
    request, sync_faults = _with_sync_batchnorm(request, name, spec, max(to_start, world.size))
    faults = [*tpu_faults, *strategy_faults, *device_faults, *sync_faults] or _world_errors(request, spec, world, count)
    faults += _half_world_errors(request, hardware, world)
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
    if faults := faults or rank_faults:  # the strategy asked for may not be installed
        own = build_strategy("single")
    strategy = own if own is not None else build_strategy(name, request.strategy_args, request.lanes)
    start: Start = spec.start if to_start > 1 else "none"
    if start == "subprocess":
        world = World(size=to_start, local_size=to_start)
    strategy.attach(world, devices)
    summary = _summary(request, name, spec, max(world.size, to_start), devices, hardware)
    return Placement(strategy, world, start, to_start, gpus, summary), faults


def _with_sync_batchnorm(
    request: DeviceRequest, name: str, spec: StrategySpec, ranks: int
) -> tuple[DeviceRequest, list[str]]:
    """Return `request` with `sync_batchnorm` as an option of its strategy, and faults."""
    if not request.sync_batchnorm or ranks == 1:
        return request, []
    if "sync_batchnorm" not in spec.options:
        return request, [f"sync_batchnorm with strategy {name}: only ddp has it: convert the layers in __init__"]
    return replace(request, strategy_args={**request.strategy_args, "sync_batchnorm": True}), []


def _resolve_alias(request: DeviceRequest) -> DeviceRequest:
    """Return `request` with Lightning's name of a strategy replaced by the name it has here.

    Raises:
        StrategyUnavailable: the strategy is an object of another library.
    """
    given: Any = request.strategy
    if given is None or isinstance(given, Strategy):
        return request
    if not isinstance(given, str):
        raise StrategyUnavailable(
            f"strategy is a {type(given).__name__} of {type(given).__module__.partition('.')[0]}: pass the name of one "
            f"({', '.join(sorted(STRATEGIES))}), and its options by strategy_args"
        )
    if given == "ddp_find_unused_parameters_true":
        options = {"find_unused_parameters": True, **request.strategy_args}
        return replace(request, strategy="ddp", strategy_args=options)
    name = STRATEGY_ALIASES.get(given, given)
    return replace(request, strategy=None if name == "auto" else name)


def _resolve_tpu_cores(request: DeviceRequest) -> tuple[DeviceRequest, list[str]]:
    """Return `request` with `tpu_cores` as options of strategy xla, and messages on faults."""
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
        faults.append(f"tpu_cores={cores!r} and {other} both choose the devices: leave one out")
    name = strategy.name if isinstance(strategy, Strategy) else strategy or "xla"
    if name != "xla" and ":" not in name:
        faults.append(f"tpu_cores={cores!r} with strategy {name}: TPUs are for strategy xla: leave strategy out")
        return request, faults
    arguments = dict(request.strategy_args) if core is None else {**request.strategy_args, "core": core}
    request = replace(request, strategy=strategy or "xla", strategy_args=arguments, devices=count, gpus=UNSET)
    return request, faults


def _own_strategy(request: DeviceRequest) -> tuple[Strategy | None, list[str]]:
    """Return the user's own strategy, if any, and messages on faults of `strategy_args`.

    The strategy is None if the request names a built-in one.
    """
    given = request.strategy
    if isinstance(given, Strategy):
        if faults := own_strategy_faults(given):
            raise JobError.of("Trainer(...)", faults)
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
    except JobError as error:
        faults = str(error).splitlines()
    try:
        return build_strategy(given), faults  # so that faults of devices are found, too
    except UserError:
        raise JobError.of("Trainer(...)", faults) from None


def _default_strategy(world: World, count: int, hardware: Hardware) -> str:
    """Return the name of the strategy if the request names none.

    Under a launcher, a world of one rank gets the same strategy as a larger one: elastic worlds change their size.
    """
    if world.launcher is None and count > 1:
        return "ddp_notebook" if hardware.interactive else "ddp"
    if world.launcher is None and not is_one_task(hardware.environment):
        return "single"
    return "horovod" if world.launcher == "horovodrun" else "ddp"


def _ranks_to_start(spec: StrategySpec, world: World, count: int) -> int:
    """Return the number of processes to start.

    1 if a launcher has started them, or one process uses all devices.
    """
    return 1 if world.launcher is not None or spec.splits_batches else count


def _world_errors(request: DeviceRequest, spec: StrategySpec, world: World, count: int) -> list[str]:
    """Return messages on differences between the world that a launcher started and `request`."""
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


def _half_world_errors(request: DeviceRequest, hardware: Hardware, world: World) -> list[str]:
    """Return a message if the environment has a rank without a size of several, or vice versa."""
    if world.launcher is not None or not request.names_none or request.strategy == "single":
        return []
    given = {name: hardware.environment.get(name) for name in ("RANK", "WORLD_SIZE")}
    return [
        f"{name} is {given[name]}, and {other} is not set: this process would train alone. Give every process both, as "
        f'torchrun does; or, to train alone, unset {name}, or set strategy="single"'
        for name, other, alone in (("RANK", "WORLD_SIZE", "0"), ("WORLD_SIZE", "RANK", "1"))
        if given[other] is None and given[name] not in (None, "", alone)
    ]


def _summary(
    request: DeviceRequest,
    name: str,
    spec: StrategySpec,
    processes: int,
    devices: list[torch.device],
    hardware: Hardware,
) -> str:
    """Return one line with the strategy, the number of processes and their devices."""
    is_default = request.strategy is None and processes > 1
    strategy = f"{name} (default: several devices and no strategy given)" if is_default else name
    where = "GPUs" if devices[0].type == "cuda" else "the CPU" if hardware.gpus else "the CPU (there is no GPU here)"
    chunks = f", each batch in {len(devices)} parts" if len(devices) > 1 else ""
    lanes = "" if request.lanes is None else f", {request.lanes} lanes"
    return f"{strategy}, {processes} process{'es' if processes > 1 else ''} on {spec.devices or where}{lanes}{chunks}"


#: of one machine, by which Lightning's `tpu_cores` counts
_CORES = 8


def parse_tpu_cores(tpu_cores: Any) -> tuple[int, int | None]:
    """Return the number of TPU cores, and the index of the core if `tpu_cores` names one.

    Args:
        tpu_cores: 1 or 8 for so many, as a number or as text, or a list with the index of one.

    Raises:
        ValueError: `tpu_cores` is not understood.

    >>> parse_tpu_cores("8"), parse_tpu_cores([5])
    ((8, None), (1, 5))
    """
    if type(tpu_cores) in (int, str) and str(tpu_cores).strip() in ("1", str(_CORES)):
        return int(tpu_cores), None
    if isinstance(tpu_cores, (list, tuple)) and len(tpu_cores) == 1:
        (core,) = tpu_cores
        if type(core) is int and 0 <= core < _CORES:
            return 1, core
    raise ValueError(
        f"tpu_cores={tpu_cores!r} names no cores of a TPU: 1 or {_CORES} of them are needed, or a list with the index "
        f"of one, [0] to [{_CORES - 1}]. For another number of cores set strategy='xla' and devices"
    )
