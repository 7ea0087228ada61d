"""Identifies a process by machine, number and start, to tell later whether it still runs."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["began", "has_ended", "local_world_id", "process_identity"]

_PROC = Path("/proc")


def process_identity() -> dict[str, Any]:
    """Return what tells this process from any other, as JSON.

    Returns:
        `host`, `pid`; on Linux also `boot` of the kernel, the `namespace` in which `pid` counts, and when the process
        `began`, in clock ticks since that boot.
    """
    found: dict[str, Any] = {"host": os.uname().nodename, "pid": os.getpid()}
    return {**found, **_here(), "began": began(os.getpid())} if sys.platform == "linux" else found


def has_ended(identity: Mapping[str, Any]) -> bool:
    """Return whether the process that `identity` names has ended; False where that cannot be seen from here."""
    if sys.platform != "linux" or any(identity.get(key) != value for key, value in _here().items()):
        return False
    return bool(began(identity["pid"]) != identity["began"])


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
    """Return a text that is the same in all processes of one world on this machine, and differs between worlds."""
    if port := os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT"):  # each of its ranks has a parent process of its own
        return f"horovodrun-{port}"
    parent = os.getppid()
    return f"{parent}-{began(parent)}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
