"""Which devices of a machine are meant, and which of them one rank has."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from midstride.engine.config.strategy_spec import StrategySpec
from midstride.engine.errors import JobError
from midstride.engine.ranks.gpus import fork_cannot_use_cuda, free_gpus_of_world, gpus_here, parse_devices, parse_gpus
from midstride.engine.strategies.base import Strategy
from midstride.engine.world import World

__all__ = [
    "UNSET",
    "DeviceRequest",
    "Hardware",
    "MachineDevices",
    "devices_of_machine",
    "devices_of_rank",
    "ensure_devices",
]

#: `gpus` was not given: None is a choice, the CPU
UNSET: Any = object()


@dataclass(frozen=True)
class DeviceRequest:
    """What a Trainer was asked for; see its arguments."""

    strategy: str | Strategy | None = None
    strategy_args: Mapping[str, Any] = field(default_factory=dict)
    devices: Any = None
    gpus: Any = UNSET
    num_nodes: int | None = None
    auto_select_gpus: bool = False
    precision: str = "32"
    tpu_cores: Any = None
    lanes: int | None = None
    accelerator: str = "auto"

    @property
    def names_none(self) -> bool:
        """Whether nothing says which devices are meant, or how many."""
        return self.devices in (None, "auto") and self.gpus is UNSET


@dataclass(frozen=True)
class Hardware:
    """What is there.

    Args:
        gpus: how many, as far as CUDA_VISIBLE_DEVICES lets this process see.
        environment: of this process.
        interactive: there is no script that could be run again.
        cuda_in_use: this process has initialised CUDA.
        cannot_fork: finds out whether a fork of this process could not use CUDA; merely to ask for CUDA is enough.
        free_gpus: finds the free GPUs; the same list in every rank of a world on this machine.
    """

    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    interactive: bool = False
    cuda_in_use: bool = False
    cannot_fork: Callable[[], bool] = fork_cannot_use_cuda
    free_gpus: Callable[[], list[int]] = free_gpus_of_world

    @classmethod
    def here(cls) -> "Hardware":
        """Return what is here."""
        # A process that multiprocessing has spawned imports its parent's script, under the second name.
        mains = (sys.modules.get(name) for name in ("__main__", "__mp_main__"))
        files = (getattr(main, "__file__", None) for main in mains)  # "<stdin>" where the code is piped in
        script = next((file for file in files if file is not None), None)
        interactive = script is None or not Path(script).exists()
        return cls(torch.cuda.device_count(), os.environ, interactive, torch.cuda.is_initialized())


@dataclass(frozen=True)
class MachineDevices:
    """The devices of a machine that are meant.

    Args:
        gpus: their indices; none where it is the CPU or a device of the strategy's.
        count: how many devices.
    """

    gpus: list[int]
    count: int


def devices_of_machine(
    request: DeviceRequest, hardware: Hardware, world: World, spec: StrategySpec
) -> tuple[MachineDevices, list[str]]:
    """Return the devices of a machine that are meant, and what is wrong with how they were asked for.

    A strategy with devices of its own takes no GPU by default.
    """
    available = 0 if request.accelerator == "cpu" else hardware.gpus
    try:
        _check_accelerator(request, hardware)
        said = [] if request.gpus is UNSET else parse_gpus(request.gpus, available)
        if said and request.devices is not None:
            raise ValueError(f"gpus={request.gpus!r} and devices={request.devices!r} say the same thing: leave one out")
        cpu = bool(spec.devices) or (request.gpus is not UNSET and not said)
        gpus, count = (said, len(said)) if said else parse_devices(request.devices, 0 if cpu else available)
    except ValueError as error:
        return MachineDevices([], 1), [str(error)]
    faults: list[str] = []
    if request.auto_select_gpus:
        gpus, faults = _select_gpus(request, gpus, hardware, world)
    return MachineDevices(gpus, count), faults


def _check_accelerator(request: DeviceRequest, hardware: Hardware) -> None:
    """Refuse an accelerator that there is not, or that what else was said contradicts."""
    kind, gpus = request.accelerator, request.gpus
    if kind not in ("auto", "cpu", "gpu"):
        raise ValueError(f"accelerator={kind!r}: one of auto, cpu and gpu is needed")
    if kind == "gpu" and not hardware.gpus:
        raise ValueError(f'accelerator="gpu": {gpus_here(0)}: say "cpu", or "auto" for GPUs where there are any')
    if kind == "gpu" and gpus in (None, 0):
        raise ValueError(f'accelerator="gpu" and gpus={gpus!r}, which is the CPU: leave one out')
    if kind == "cpu" and (gpus not in (UNSET, None, 0) or isinstance(request.devices, list)):
        named = f"gpus={gpus!r}" if request.devices is None else f"devices={request.devices!r}"
        raise ValueError(f'accelerator="cpu" and {named}, which are GPUs: leave one out')


def _select_gpus(
    request: DeviceRequest, gpus: list[int], hardware: Hardware, world: World
) -> tuple[list[int], list[str]]:
    """Return as many GPUs as in `gpus`, of those that are free; where a launcher started ranks, one for each.

    Where that cannot be, return `gpus` and what is wrong.
    """
    if chosen := hardware.environment.get(World.STARTED):  # by rank 0; its own GPU is no longer free
        return [int(gpu) for gpu in chosen.split(",")], []
    given = request.devices if request.gpus is UNSET else request.gpus
    count = world.local_size if request.names_none else len(gpus)
    if isinstance(given, (list, str)) and given != "auto":
        fault = f"auto_select_gpus=True chooses among GPUs, and {given!r} names them: give a number of GPUs"
    elif not gpus:
        fault = "auto_select_gpus=True: there is no GPU to choose here, or none was asked for"
    elif len(free := hardware.free_gpus()) < count:
        fault = (
            f"auto_select_gpus=True: {count} GPUs are needed, and of the {hardware.gpus} here only "
            f"{free} are free: ask for fewer, or wait"
        )
    else:
        return free[:count], []
    return gpus, [fault]


def devices_of_rank(
    request: DeviceRequest, hardware: Hardware, world: World, spec: StrategySpec, machine: MachineDevices
) -> tuple[list[torch.device], list[str]]:
    """Return the devices of this process, of those of its machine, and what is wrong if they are too few."""
    gpus = machine.gpus
    per_process = machine.count if spec.splits_batches else 1
    if not gpus:
        return [torch.device("cpu")] * per_process, []
    if world.local_size > 1 and spec.splits_batches and request.gpus is not UNSET:
        per_process = len(gpus) // world.local_size
    elif world.local_size > 1 and (spec.splits_batches or request.names_none) and not request.auto_select_gpus:
        # Each process of a machine takes the next ones.
        gpus = [0] * world.local_size * per_process if _is_given_its_gpu(hardware, world) else [*range(hardware.gpus)]
    per_process = max(1, per_process)
    too_few = len(gpus) < world.local_size * per_process  # every rank says so, not the last ones alone
    mine = gpus[world.local_rank * per_process : (world.local_rank + 1) * per_process]
    devices = [torch.device("cuda", gpu) for gpu in mine] or [torch.device("cpu")]
    return devices, [_too_few_gpus(hardware, world, per_process)] if too_few else []


def _is_given_its_gpu(hardware: Hardware, world: World) -> bool:
    """Whether the one GPU that this process sees may be its own: torchrun hides none from any process.

    That it is not another rank's as well is seen when the ranks meet.
    """
    hidden = "CUDA_VISIBLE_DEVICES" in hardware.environment or world.launcher not in ("torchrun", "midstride")
    return hardware.gpus == 1 and hidden


def _uuid(gpu: torch.device) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _too_few_gpus(hardware: Hardware, world: World, per_process: int) -> str:
    each = "a GPU each" if per_process == 1 else f"{per_process} GPUs each"
    return (
        f"{world.local_size} processes with {each} were started on this machine, and {gpus_here(hardware.gpus)}: "
        f'start {hardware.gpus // per_process or "no more than there are GPUs for"}, or say accelerator="cpu" (in a '
        "job world.accelerator: cpu)"
    )


def ensure_devices(strategy: Strategy, uuid_of: Callable[[torch.device], str] = _uuid) -> None:
    """Refuse ranks on other kinds of devices than rank 0, and a GPU that two ranks have. Every rank calls this.

    A machine whose GPUs are not seen gives its ranks the CPU; torchrun and the like hide no GPU from any process.

    Raises:
        JobError: naming the ranks and their machines, or the GPU.
    """
    if strategy.world.size == 1:
        return
    kind = strategy.device.type
    own = socket.gethostname(), kind, [uuid_of(gpu) for gpu in strategy.devices] if kind == "cuda" else []
    ranks: list[tuple[str, str, list[str]]] = strategy.collective.gather(own)
    taken: dict[tuple[str, str], int] = {}
    for rank, (host, kind, gpus) in enumerate(ranks):
        if kind != ranks[0][1]:
            raise JobError(
                f"rank 0 on {ranks[0][0]} has the device {ranks[0][1]}, and rank {rank} on {host} has {kind}: all need "
                "the same. See why torch finds no GPU on one of them (nvidia-smi tells), leave that machine out, or "
                'say accelerator="cpu" (in a job world.accelerator: cpu)'
            )
        for gpu in gpus:
            if (other := taken.setdefault((host, gpu), rank)) != rank:
                raise JobError(
                    f"ranks {other} and {rank} were both given GPU {gpu} of {host}, which has fewer GPUs than "
                    'processes, or hides some (CUDA_VISIBLE_DEVICES): start fewer processes, or say accelerator="cpu" '
                    "(in a job world.accelerator: cpu)"
                )
