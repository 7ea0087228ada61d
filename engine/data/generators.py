"""The main generators of a process, looked at and seeded at a cost that a trivial data set can bear."""

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

__all__ = ["SEED", "Peeks", "moved", "peeks", "put_back_numpy", "put_back_random", "put_back_torch", "seed_generators"]

_torch = torch.default_generator
_MT19937_BYTES = 625 * 4  # 624 words and a position


def _peek_at_random() -> Callable[[], bytes] | None:
    """Return a reader of the words of `random` that costs 0.3 us instead of 20, where their layout is known."""
    address = id(_inst) + object.__basicsize__

    def peek() -> bytes:
        return ctypes.string_at(address, _MT19937_BYTES)

    return peek if _random_state(peek()) == random.getstate()[1] else None


def _random_state(words: bytes) -> tuple[int, ...]:
    """Return the middle of `random.getstate()`, given the words in memory: the position stands first there."""
    position, *state = np.frombuffer(words, dtype=np.uint32).tolist()
    return (*state, position)


_inst: Any = random._inst
_random_words = _peek_at_random()


def _peek_random() -> tuple[object, float | None]:
    # A second gaussian may wait outside the words.
    return (_random_words() if _random_words else random.getstate()[1]), _inst.gauss_next


def put_back_random(peeked: tuple[object, float | None]) -> None:
    """Put `random` back to where it was seen; through its state as a tuple that would cost 30 us."""
    words, gauss_next = peeked
    if isinstance(words, bytes):
        ctypes.memmove(id(_inst) + object.__basicsize__, words, _MT19937_BYTES)
        _inst.gauss_next = gauss_next
    else:
        random.setstate((3, words, gauss_next))


def put_back_numpy(words: object) -> bool:
    """Put numpy back to where it was seen with no gaussian waiting, in 4 us; return whether that is possible here."""
    generator = get_bit_generator()
    if not isinstance(words, bytes) or not isinstance(generator, np.random.MT19937):
        return False
    np.random.seed(0)  # takes a gaussian away that is waiting
    ctypes.memmove(generator.ctypes.state_address, words, _MT19937_BYTES)
    return True


def _peek_at_numpy() -> object:
    # Asked for anew each time: a user may put another bit generator in place.
    generator = get_bit_generator()
    if generator is _first and _first_address:
        return ctypes.string_at(_first_address, _MT19937_BYTES)
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state)


_first = get_bit_generator()
_first_address = _first.ctypes.state_address if isinstance(_first, np.random.MT19937) else 0


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed >> 32)


#: torch.manual_seed would also queue seeds for every accelerator, at 100 times the cost
SEED: tuple[Callable[[int], object], ...] = (_torch.manual_seed, _seed_numpy, random.seed)


Peeks = tuple[bytes, object, tuple[object, float | None]]


def peeks() -> Peeks:
    """Return a look at torch, numpy and `random`, to compare with a later one."""
    state = _torch.get_state()
    # As bytes: torch.equal takes 10 us for what bytes compare in 0.1.
    return ctypes.string_at(state.data_ptr(), state.numel()), _peek_at_numpy(), _peek_random()


def put_back_torch(peeked: bytes) -> None:
    """Put torch's generator on the CPU back to where it was seen."""
    _torch.set_state(torch.frombuffer(bytearray(peeked), dtype=torch.uint8))


def moved(before: Peeks, after: Peeks) -> list[bool]:
    """Return which of torch, numpy and `random` drew between two looks."""
    return [before[0] != after[0], before[1] != after[1], before[2] != after[2]]


def seed_generators(seed: int) -> None:
    """Seed torch, numpy and `random` of this process; torch's generators on accelerators stay as they are."""
    for set_seed in SEED:
        set_seed(seed)
