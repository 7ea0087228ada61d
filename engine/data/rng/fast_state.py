"""Reads and seeds the main generators of a process, fast enough for trivial data sets."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from midstride.engine.data.rng.raw_memory import MT19937_BYTES, RawState, memory_view, random_state, torch_state

__all__ = [
    "SEED",
    "RngReading",
    "read_rng",
    "restore_numpy",
    "restore_random",
    "restore_torch",
    "rng_changed",
    "seed_generators",
]

_torch = torch.default_generator
_inst: Any = random._inst
_torch_words, _random_words = torch_state(_torch), random_state()


def _numpy_words(generator: Any) -> RawState | None:
    """Return the state words of numpy's generator; None if it is not an MT19937."""
    if not isinstance(generator, np.random.MT19937):
        return None
    return memory_view(generator.ctypes.state_address, MT19937_BYTES)


_first = get_bit_generator()
_first_words = _numpy_words(_first)


def _read_numpy(generator: Any) -> object:
    words = _numpy_words(generator)
    return repr(generator.state) if words is None else words.raw


def restore_numpy(words: object) -> bool:
    """Restore numpy's generator without a gaussian in 1 to 4 us; return whether supported."""
    generator = get_bit_generator()
    memory = _first_words if generator is _first else _numpy_words(generator)
    if memory is None or not isinstance(words, bytes):
        return False
    if memory.raw != _seeded:
        np.random.seed(0)  # drops a cached gaussian
    memory.raw = words
    return True


def restore_torch(words: Any) -> None:
    """Restore torch's CPU generator."""
    _torch_words.raw = words


def restore_random(reading: tuple[Any, float | None]) -> None:
    """Restore the generator of `random`."""
    _random_words.raw, _inst.gauss_next = reading


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed >> 32)


_base: Any = random.Random.__base__
_seed_words: Callable[[int], object] = _base.seed.__get__(_inst)


def _seed_random(seed: int) -> None:
    """Seed as `random.seed` does for an integer, without its checks."""
    _seed_words(seed)
    _inst.gauss_next = None


#: seeders of torch, numpy and `random`; torch.manual_seed would also seed accelerators, at 100 times the cost
SEED: tuple[Callable[[int], object], ...] = (_torch.manual_seed, _seed_numpy, _seed_random)
#: numpy's words after the last `seed_generators`; while they are unchanged, there is no cached gaussian
_seeded: bytes | None = None

#: states of torch, numpy, and `random` with its cached gaussian
RngReading = tuple[Any, object, tuple[Any, float | None]]


def read_rng() -> RngReading:
    """Return the states of torch, numpy and `random`, to compare with a later reading."""
    generator = get_bit_generator()  # not cached, since users may replace it
    known = _first_words if generator is _first else None
    numpy_words = _read_numpy(generator) if known is None else known.raw
    return _torch_words.raw, numpy_words, (_random_words.raw, _inst.gauss_next)


def rng_changed(before: RngReading, after: RngReading) -> list[bool]:
    """Return whether torch, numpy and `random` changed between two readings."""
    return [before[0] != after[0], before[1] != after[1], before[2] != after[2]]


def seed_generators(seed: int) -> None:
    """Seed torch, numpy and `random` of this process, except torch's on accelerators."""
    global _seeded
    for set_seed in SEED:
        set_seed(seed)
    _seeded = None if _first_words is None else _first_words.raw
