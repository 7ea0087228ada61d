"""The environment of our own programs: the variables that decide bits are always set."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["cores", "hash_seed", "hash_seed_set", "program_environment"]

_HASH_SEED = "PYTHONHASHSEED"  # which a new interpreter reads before all else


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def program_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment of a computing program. Variables set in `base` keep their values.

    Args:
        base: the environment of this process.
        threads: number of threads in which torch computes.
    """
    # Without a fixed hash seed the order of a set of text differs from interpreter to interpreter.
    fixed = {"OMP_NUM_THREADS": str(threads), _HASH_SEED: "0"}
    return {**fixed, **base, "PYTHONUNBUFFERED": "1"}


def hash_seed() -> dict[str, str]:
    """Return a variable that makes all interpreters of this process hash text in one way.

    It is empty if the variable is set.

    They cannot hash as this process does: Python does not reveal its seed. The value follows from the hash of a text.
    """
    return {} if _HASH_SEED in os.environ else {_HASH_SEED: str(hash("midstride") % 2**32)}


@contextmanager
def hash_seed_set(environment: Mapping[str, str]) -> Iterator[None]:
    """Let interpreters of `multiprocessing` in the block hash text as in `environment`."""
    before, wanted = os.environ.get(_HASH_SEED), environment.get(_HASH_SEED)
    if wanted is not None:
        os.environ[_HASH_SEED] = wanted
    try:
        yield
    finally:
        if before is not None:
            os.environ[_HASH_SEED] = before
        else:
            os.environ.pop(_HASH_SEED, None)
