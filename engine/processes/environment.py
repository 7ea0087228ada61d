"""The environment of a program of ours: what is part of its bits is said, not left to chance."""

import os
from collections.abc import Mapping

__all__ = ["cores", "program_environment"]


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def program_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment of a program that computes; what a person has set in `base` stands.

    Args:
        base: of this process.
        threads: in which torch computes.
    """
    # The order of a set of text is another in each interpreter unless this is fixed.
    fixed = {"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0"}
    return {**fixed, **base, "PYTHONUNBUFFERED": "1"}
