"""Identifies a process by machine, number and start, to tell later whether it still runs."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midstride.engine.processes.lifetime import parent_of

__all__ = ["began", "has_ended", "is_running", "is_visible", "local_world_id", "process_identity"]

_PROC = Path("/proc")
#: variables in which launchers give a process its rank
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def process_identity() -> dict[str, Any]:
    """Return the identity of this process, which no other has, as JSON.

    Returns:
        `host`, `pid`; on Linux also `boot` of the kernel, the `namespace` in which `pid` counts, and when the process
        `began`, in clock ticks since that boot.
    """
    found: dict[str, Any] = {"host": os.uname().nodename, "pid": os.getpid()}
    return {**found, **_here(), "began": began(os.getpid())} if sys.platform == "linux" else found


def has_ended(identity: Mapping[str, Any]) -> bool:
    """Return True if the process of `identity` has ended; False if that is invisible from here."""
    return is_visible(identity) and began(identity["pid"]) != identity["began"]


def is_running(identity: Mapping[str, Any]) -> bool:
    """Return True if the process of `identity` runs; False if that is invisible from here."""
    return is_visible(identity) and began(identity["pid"]) == identity["began"]


def is_visible(identity: Mapping[str, Any]) -> bool:
    """Return True if the process is or was on this machine, among those visible from here."""
    return sys.platform == "linux" and all(identity.get(key) == value for key, value in _here().items())


def _here() -> dict[str, str]:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return {"boot": boot, "namespace": str((_PROC / "self/ns/pid").readlink())}


def began(pid: int) -> int | None:
    """Return when the process began, in clock ticks since the boot; None of one that has ended."""
    try:
        state, *fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def local_world_id() -> str:
    """Return a text shared by all processes of one world on this machine, and no other world."""
    if port := os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT"):  # each of its ranks has a parent process of its own
        return f"horovodrun-{os.environ.get('HOROVOD_GLOO_RENDEZVOUS_ADDR', '')}-{port}"
    launcher = _launcher()
    return f"{launcher}-{began(launcher)}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _launcher() -> int:
    """Return the launcher of this machine's ranks: the parent, or above it a wrapping shell's."""
    process, rank = os.getppid(), _rank_in(os.environ)
    while rank and _rank_in(_environment_of(process)) == rank:
        process = parent_of(process)
    return process


def _rank_in(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in _RANKS if name in environment}


def _environment_of(process: int) -> dict[str, str]:
    """Return the variables with which `process` was started; none if they cannot be read."""
    try:
        text = os.fsdecode((_PROC / str(process) / "environ").read_bytes())
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, _, value in pairs}
