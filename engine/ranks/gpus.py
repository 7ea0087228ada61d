"""Parses `gpus` and `devices`, and finds GPUs and free ones, without initialising CUDA."""

import atexit
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from midstride.engine.processes.process_identity import has_ended, local_world_id, process_identity
from midstride.engine.session.private_file import own_folder
from midstride.engine.strategies.torch_internals import is_in_bad_fork

__all__ = ["fork_cannot_use_cuda", "free_gpus_of_world", "gpus_here", "parse_devices", "parse_gpus"]

_PROBE_S = 120.0

#: run in a process of its own: a query of a GPU takes memory on it, and after one a process cannot fork ranks
_PROBE = """
import json, torch
free = []
for gpu in range(torch.cuda.device_count()):
    try:
        torch.zeros(1, device=f"cuda:{gpu}")
        left, whole = torch.cuda.mem_get_info(gpu)
        free.append(left / whole)
    except RuntimeError:
        free.append(0.0)  # in exclusive mode, and held by another process
print(json.dumps(free))
"""
#: share of its memory below which a GPU counts as in use; a CUDA context takes a few percent
_FREE = 0.9


def parse_gpus(gpus: Any, available: int) -> list[int]:
    """Return the indices of the GPUs that `gpus` selects; an empty list means the CPU.

    Args:
        gpus: None or 0 for the CPU, k for the first k, -1 or "-1" for all, a list of indices, or text that
            names indices: "3" is GPU 3, "1, 3" are two.
        available: number of GPUs here.

    Raises:
        ValueError: `gpus` is not understood, or selects a GPU that does not exist.

    >>> parse_gpus("1, 3", available=4)
    [1, 3]
    """
    if gpus is None:
        return []
    if type(gpus) is int or gpus == "-1":
        return _first(int(gpus), available)
    indices = gpus
    if isinstance(gpus, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", gpus):
        indices = [int(index) for index in gpus.split(",")]
    if not isinstance(indices, list) or not indices or any(type(index) is not int or index < 0 for index in indices):
        raise ValueError(_not_a_number_of_gpus(gpus, available))
    if len(set(indices)) < len(indices):
        raise ValueError(f"gpus={gpus!r} names a GPU twice; {gpus_here(available)}")
    if missing := [index for index in indices if index >= available]:
        raise ValueError(f"gpus={gpus!r}: there is no GPU {' nor '.join(map(str, missing))}; {gpus_here(available)}")
    return indices


def _first(count: int, available: int) -> list[int]:
    if count < -1:
        raise ValueError(_not_a_number_of_gpus(count, available))
    if count == -1 and not available:
        raise ValueError(f"gpus=-1 means all GPUs; {gpus_here(available)}: for the CPU set gpus=0")
    if count > available:
        raise ValueError(f"gpus={count} means {count} GPUs; {gpus_here(available)}")
    return list(range(available if count == -1 else count))


def _not_a_number_of_gpus(gpus: Any, available: int) -> str:
    return (
        f"gpus={gpus!r} names no GPUs: a number of them is needed, -1 for all, a list of indices such as [1, 3], or "
        f'text such as "1, 3"; {gpus_here(available)}'
    )


def gpus_here(available: int) -> str:
    """Return a text that tells which GPUs there are."""
    if not available:
        return "there is no GPU here (torch.cuda sees none)"
    return "there is GPU 0 here" if available == 1 else f"there are GPUs 0 to {available - 1} here"


def parse_devices(devices: Any, available: int) -> tuple[list[int], int]:
    """Return the GPU indices that `devices` selects, and the number of devices.

    Without GPUs, the devices are the CPU's.

    Args:
        devices: None for one, "auto" for all GPUs or else the CPU, k for so many, -1 for all GPUs, or a list of
            their indices.
        available: number of GPUs here.

    Raises:
        ValueError: `devices` is not understood, or selects a GPU that does not exist.

    >>> parse_devices(2, available=0)
    ([], 2)
    """
    if devices in (None, "auto"):
        gpus = list(range(available if devices == "auto" else min(1, available)))
        return gpus, len(gpus) or 1
    if type(devices) is int and devices > 0 and not available:
        return [], devices
    if isinstance(devices, list) or (type(devices) is int and (devices == -1 or devices > 0)):
        try:
            gpus = parse_gpus(devices, available)
        except ValueError as error:
            raise ValueError(str(error).replace("gpus=", "devices=", 1)) from None
        return gpus, len(gpus)
    raise ValueError(
        f'devices={devices!r} names no devices: a number of them is needed, "auto", -1 for all GPUs, or a list of the '
        f"indices of GPUs; {gpus_here(available)}"
    )


def free_gpus_of_world() -> list[int]:
    """Return the free GPUs, the same list in every process of one world on this machine.

    The first process to call this probes them and writes the list to a file, with its own identity: a later probe would
    count the GPUs that other ranks of this world use by then as taken. It removes the file when it ends; the list of a
    process that was killed does not count.
    """
    path = own_folder() / f"gpus-{local_world_id()}"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        written: dict[str, Any] = json.loads(file.read() or "{}")
        if not written or has_ended(written["process"]):
            written = {"process": process_identity(), "free": _free_gpus()}
            file.truncate(0)
            file.write(json.dumps(written))
            atexit.register(path.unlink, missing_ok=True)
        free: list[int] = written["free"]
        return free


def fork_cannot_use_cuda() -> bool:
    """Return whether a process forked from this one could not use CUDA; forks one to find out."""
    child = os.fork()
    if child == 0:
        os._exit(int(is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _free_gpus() -> list[int]:
    """Return the GPUs with nearly all their memory free, and not taken in exclusive mode."""
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=True)
    shares: Sequence[float] = json.loads(probe.stdout.splitlines()[-1])
    return [gpu for gpu, share in enumerate(shares) if share >= _FREE]
