"""Settings of a machine that decide the last bits of sums, compared when nodes meet."""

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstride.engine.errors import JobError

__all__ = ["bits_here", "check_bits"]

_GPUS = Path("/proc/driver/nvidia/gpus")


def bits_here() -> dict[str, Any]:
    """Return what decides how this machine computes a sum, as JSON; no GPU is touched."""
    return {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "gpu": sorted({_model(path) for path in _GPUS.glob("*/information")}),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _model(information: Path) -> str:
    lines = information.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "")


def _bit_differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Return what `here` has otherwise than `there`, with both values; "" if they are alike."""
    return ", ".join(
        f"{key} {there.get(key)!r} there and {here[key]!r} here" for key in here if there.get(key) != here[key]
    )


def check_bits(first: dict[str, Any], here: dict[str, Any], *, hosts: tuple[str, str], refuses: bool) -> str:
    """Return a sentence on how this node differs from the first that came; "" if they are alike.

    Args:
        first: `bits_here` of the first.
        here: `bits_here` of this one.
        hosts: their names.
        refuses: the run is in lanes, which promise the same bits on any nodes, and no others were accepted.

    Raises:
        JobError: they differ, and the run promises the same bits.
    """
    if not (differences := _bit_differences(first, here)):
        return ""
    words = f"node {hosts[1]} computes sums otherwise than node {hosts[0]}: {differences}"
    if refuses:
        raise JobError(
            f"{words}. A run in lanes has the same bits on any nodes: let nodes join that are alike, or accept others: "
            "--accept-change bits (accept_change: [bits] in the job)"
        )
    return words
