"""Devices of a machine that a Trainer uses, and those of one rank."""

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
    """The arguments of a Trainer that select strategy and devices; see `Trainer`."""

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
    sync_batchnorm: bool = False

    @property
    def names_none(self) -> bool:
        """Whether neither the number of devices nor their indices were given."""
        return self.devices in (None, "auto") and self.gpus is UNSET


@dataclass(frozen=True)
class Hardware:
    """The hardware and the process that a placement is resolved for.

    Args:
        gpus: number of GPUs that this process sees, as CUDA_VISIBLE_DEVICES limits them.
        environment: environment variables of this process.
        interactive: whether there is no script that could be run again.
        cuda_in_use: whether this process has initialised CUDA.
        cannot_fork: returns whether a fork of this process could not use CUDA, as after any query of CUDA.
        free_gpus: returns the indices of free GPUs; the same list in every rank of a world on this machine.
    """

    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    interactive: bool = False
    cuda_in_use: bool = False
    cannot_fork: Callable[[], bool] = fork_cannot_use_cuda
    free_gpus: Callable[[], list[int]] = free_gpus_of_world

    @classmethod
    def here(cls) -> "Hardware":
        """Return the hardware of this machine, and the state of this process."""
        # A process that multiprocessing has spawned imports its parent's script, under the second name.
        mains = (sys.modules.get(name) for name in ("__main__", "__mp_main__"))
        files = (getattr(main, "__file__", None) for main in mains)  # "<stdin>" where the code is piped in
        script = next((file for file in files if file is not None), None)
        interactive = script is None or not Path(script).exists()
        return cls(torch.cuda.device_count(), os.environ, interactive, torch.cuda.is_initialized())


@dataclass(frozen=True)
class MachineDevices:
    """The devices of one machine that a Trainer uses.

    Args:
        gpus: indices of the GPUs; empty for the CPU, and where the strategy has devices of its own.
        count: number of devices.
    """

    gpus: list[int]
    count: int


def devices_of_machine(
    request: DeviceRequest, hardware: Hardware, world: World, spec: StrategySpec
) -> tuple[MachineDevices, list[str]]:
    """Return the machine's devices that `request` selects, and messages on its faults.

    For a strategy with devices of its own, no GPU is selected by default.
    """
    available = 0 if request.accelerator == "cpu" else hardware.gpus
    try:
        _check_accelerator(request, hardware)
        said = [] if request.gpus is UNSET else parse_gpus(request.gpus, available)
        if said and request.devices is not None:
            raise ValueError(f"gpus={request.gpus!r} and devices={request.devices!r} mean the same: leave one out")
        cpu = bool(spec.devices) or (request.gpus is not UNSET and not said)
        gpus, count = (said, len(said)) if said else parse_devices(request.devices, 0 if cpu else available)
    except ValueError as error:
        return MachineDevices([], 1), [str(error)]
    faults: list[str] = []
    if request.auto_select_gpus:
        gpus, faults = _select_gpus(request, gpus, hardware, world)
    return MachineDevices(gpus, count), faults


def _check_accelerator(request: DeviceRequest, hardware: Hardware) -> None:
    """Check the argument `accelerator`.

    Raises:
        ValueError: it is unknown, not available here, or contradicts `gpus` or `devices`.
    """
    kind, gpus = request.accelerator, request.gpus
    if kind not in ("auto", "cpu", "gpu"):
        raise ValueError(f"accelerator={kind!r}: one of auto, cpu and gpu is needed")
    if kind == "gpu" and not hardware.gpus:
        raise ValueError(f'accelerator="gpu": {gpus_here(0)}: use "cpu", or "auto" for GPUs where there are any')
    if kind == "gpu" and gpus in (None, 0):
        raise ValueError(f'accelerator="gpu" and gpus={gpus!r}, which is the CPU: leave one out')
    if kind == "cpu" and (gpus not in (UNSET, None, 0) or isinstance(request.devices, list)):
        named = f"gpus={gpus!r}" if request.devices is None else f"devices={request.devices!r}"
        raise ValueError(f'accelerator="cpu" and {named}, which are GPUs: leave one out')


def _select_gpus(
    request: DeviceRequest, gpus: list[int], hardware: Hardware, world: World
) -> tuple[list[int], list[str]]:
    """Return as many free GPUs as `gpus` has; without a number, one per rank on this machine.

    If this is not possible, return `gpus` and a message.
    """
    if chosen := hardware.environment.get(World.STARTED):  # rank 0 has selected them, and uses one of them by now
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
    """Return the devices of this process, and a message if its machine has too few."""
    gpus = machine.gpus
    per_process = machine.count if spec.splits_batches else 1
    if not gpus:
        return [torch.device("cpu")] * per_process, []
    if world.local_size > 1 and spec.splits_batches and request.gpus is not UNSET:
        per_process = len(gpus) // world.local_size
    elif world.local_size > 1 and (spec.splits_batches or request.names_none) and not request.auto_select_gpus:
        # The processes of a machine take consecutive GPUs, in the order of their local ranks.
        gpus = [0] * world.local_size * per_process if _is_given_its_gpu(hardware, world) else [*range(hardware.gpus)]
    per_process = max(1, per_process)
    too_few = len(gpus) < world.local_size * per_process  # for all processes, so that every rank raises the error
    mine = gpus[world.local_rank * per_process : (world.local_rank + 1) * per_process]
    devices = [torch.device("cuda", gpu) for gpu in mine] or [torch.device("cpu")]
    return devices, [_too_few_gpus(hardware, world, per_process)] if too_few else []


def _is_given_its_gpu(hardware: Hardware, world: World) -> bool:
    """Return whether this process may see a single GPU because its launcher chose it.

    torchrun hides no GPU from its processes. `ensure_devices` checks later that no two ranks have the same GPU.
    """
    hidden = "CUDA_VISIBLE_DEVICES" in hardware.environment or world.launcher not in ("torchrun", "midstride")
    return hardware.gpus == 1 and hidden


def _uuid(gpu: torch.device) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _too_few_gpus(hardware: Hardware, world: World, per_process: int) -> str:
    each = "a GPU each" if per_process == 1 else f"{per_process} GPUs each"
    return (
        f"{world.local_size} processes with {each} were started on this machine, and {gpus_here(hardware.gpus)}: "
        f'start {hardware.gpus // per_process or "no more than there are GPUs for"}, or set accelerator="cpu" (in a '
        "job world.accelerator: cpu)"
    )


def ensure_devices(strategy: Strategy, uuid_of: Callable[[torch.device], str] = _uuid) -> None:
    """Check that all ranks have devices of one kind, and no GPU is shared.

    Every rank calls this.

    Both happen: ranks use the CPU where torch finds no GPU, and torchrun hides no GPU from its processes.

    Args:
        strategy: attached to its world and devices; its collective is used.
        uuid_of: returns the UUID of a GPU.

    Raises:
        JobError: it names the ranks and their machines, and the GPU.
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
                "the same. Run nvidia-smi to see why torch finds no GPU on one of them, leave that machine out, or "
                'set accelerator="cpu" (in a job world.accelerator: cpu)'
            )
        for gpu in gpus:
            if (other := taken.setdefault((host, gpu), rank)) != rank:
                raise JobError(
                    f"ranks {other} and {rank} were both given GPU {gpu} of {host}, which has fewer GPUs than "
                    'processes, or hides some (CUDA_VISIBLE_DEVICES). Start fewer processes, or set accelerator="cpu" '
                    "(in a job world.accelerator: cpu)"
                )
