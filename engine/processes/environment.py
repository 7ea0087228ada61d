"""The environment of a program of ours: what is part of its bits is said, not left to chance."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["cores", "hash_seed", "hash_seed_set", "program_environment"]

_HASH_SEED = "PYTHONHASHSEED"  # which a new interpreter reads before all else


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
    fixed = {"OMP_NUM_THREADS": str(threads), _HASH_SEED: "0"}
    return {**fixed, **base, "PYTHONUNBUFFERED": "1"}


def hash_seed() -> dict[str, str]:
    """Return the variable by which all fresh processes of this one hash text alike, unless it is set.

    As this process does they cannot: Python tells no seed. Those of another process that hashes otherwise do, too.
    """
    return {} if _HASH_SEED in os.environ else {_HASH_SEED: str(hash("midstride") % 2**32)}


@contextmanager
def hash_seed_set(environment: Mapping[str, str]) -> Iterator[None]:
    """Have interpreters that `multiprocessing` starts within the block hash text as `environment` says."""
    is_other = _HASH_SEED in environment and _HASH_SEED not in os.environ
    if is_other:
        os.environ[_HASH_SEED] = environment[_HASH_SEED]
    try:
        yield
    finally:
        if is_other:
            del os.environ[_HASH_SEED]
