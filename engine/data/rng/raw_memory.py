"""The memory in which the main generators keep their state, read in 0.2 us and written.

Their public functions take 4 to 60 us. The memory layout is tested first; if it is not the expected one, the public
functions are used.
"""

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from midstride.engine.data.torch_internals import generator_address

__all__ = ["MT19937_BYTES", "RawState", "StateAccessor", "memory_view", "random_state", "torch_state"]

#: bytes of 624 words and a position
MT19937_BYTES = 625 * 4
#: bytes before torch's words (seed, words left, whether it was seeded, position) and after them (a cached float and a
#: cached double, each with a flag)
_BEFORE, _AFTER = 20, 4 + 8 + 16
_STATE_BEFORE = 24  # bytes before the words in the result of get_state(), which has 8 bytes for each word of 4


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


RawState = Any  # a ctypes array or a `StateAccessor`, whose state is its attribute `raw`


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
    return memory_view(generator_address(generator) + offset - _BEFORE, _BEFORE + 624 * 4 + _AFTER)


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
