"""Reads and seeds the main generators of a process, fast enough for trivial data sets."""

import ctypes
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from midstride.engine.data.torch_internals import generator_address

__all__ = [
    "SEED",
    "RngReading",
    "StateAccessor",
    "random_state",
    "read_rng",
    "restore_numpy",
    "restore_random",
    "restore_torch",
    "rng_changed",
    "seed_generators",
    "torch_state",
]


#: bytes of 624 words and a position
MT19937_BYTES = 625 * 4
_STATE_BEFORE = 24  # bytes before the words in the result of get_state(), which has 8 bytes for each word of 4
#: a generator of torch in memory: seed, words left and whether it was seeded; position and words; a cached float and a
#: cached double, each with a flag. Padding lies between: a seed copies what lay on the stack into it
_TORCH = struct.Struct("13s 3x 2500s 4x 5s 3x 9s 7x")
_BEFORE = 20  # bytes before its words


class StateAccessor:
    """The state of a generator as the attribute `raw`, by functions.

    Args:
        get: returns the state.
        put: sets the state.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put

    @property
    def raw(self) -> Any:
        """The state."""
        return self._get()

    @raw.setter
    def raw(self, state: Any) -> None:
        self._put(state)


RawState = Any  # a ctypes array, `_TorchWords` or a `StateAccessor`, whose state is its attribute `raw`


def memory_view(address: int, size: int) -> RawState:
    """Return `size` bytes of memory at `address` as a ctypes array."""
    return (ctypes.c_char * size).from_address(address)


def torch_state(generator: torch.Generator) -> RawState:
    """Return the state of a CPU generator of torch, with cached normal numbers."""
    trial = torch.Generator().manual_seed(1)
    offset = _state_offset(trial)
    if (
        offset is not None
        and offset == _state_offset(generator)
        and _is_restorable(trial, _torch_window(trial, offset))
    ):
        return _torch_window(generator, offset)

    def get() -> bytes:
        return generator.get_state().numpy().tobytes()

    def put(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return StateAccessor(get, put)


def _state_offset(generator: torch.Generator) -> int | None:
    state = generator.get_state().numpy().tobytes()
    words = b"".join(state[_STATE_BEFORE + 8 * i : _STATE_BEFORE + 8 * i + 4] for i in range(8))
    offset: int = memory_view(generator_address(generator), 256).raw.find(words)
    return offset if offset >= _BEFORE else None


def _torch_window(generator: torch.Generator, offset: int) -> RawState:
    return _TorchWords(memory_view(generator_address(generator) + offset - _BEFORE, _TORCH.size))


class _TorchWords:
    """The state of torch's generator as the attribute `raw`, equal for equal states.

    Args:
        memory: the state's memory.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    @property
    def raw(self) -> tuple[bytes, ...]:
        """The state, without padding and cached numbers that were used."""
        head, words, cached_float, cached_double = _TORCH.unpack_from(self._memory)
        return head, words, cached_float if cached_float[-1] else b"", cached_double if cached_double[-1] else b""

    @raw.setter
    def raw(self, state: tuple[bytes, ...]) -> None:
        _TORCH.pack_into(self._memory, 0, *state)


def _is_restorable(generator: torch.Generator, words: RawState) -> bool:
    """Return whether writing `words` restores the generator after all kinds of draws."""
    for draw in (torch.rand, torch.randn, torch.randn):
        before, seen = generator.get_state(), words.raw
        draw(1, generator=generator)
        moved = words.raw != seen
        words.raw = seen
        if not moved or not torch.equal(generator.get_state(), before):
            return False
        draw(1, generator=generator)
    return True


def random_state() -> RawState:
    """Return the state of `random` without its cached normal number."""
    inst: Any = random._inst
    words = memory_view(id(inst) + object.__basicsize__, MT19937_BYTES)
    # The position is first in memory, and last in the result of getstate().
    position, *state = np.frombuffer(words.raw, dtype=np.uint32).tolist()
    return words if (*state, position) == random.getstate()[1] else StateAccessor(random.getstate, random.setstate)


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
