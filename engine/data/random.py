"""Random numbers in the data that need no saved state.

Every sample is read with generators seeded by where it stands in the epoch, and every
batch is collated with generators seeded by where it starts. So prefetching, the number
of workers and restarts change nothing, and nothing per batch travels between processes.

Seeding three generators for every sample would cost more than a trivial data set, so it
is done lazily: a generator is taken for unused until a fetch is seen to have moved it;
then that fetch is done again with seeds, and from then on the generator is always seeded.
This asks of a data set that reading a sample twice gives the same sample twice.
"""

import ctypes
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from midstride.engine.seeds import mix

__all__ = ["LazySeeds", "MainGeneratorsKept"]

T = TypeVar("T")
_torch = torch.default_generator
_COLLATE = (1 << 64) - 1  # sets a batch's seed for collate apart from its samples'
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


def _put_back_random(peeked: tuple[object, float | None]) -> None:
    words, gauss_next = peeked
    random.setstate((3, _random_state(words) if isinstance(words, bytes) else words, gauss_next))


def _peek_at_numpy() -> object:
    # Asked for anew each time: a user may put another bit generator in place.
    generator = get_bit_generator()
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state)


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed >> 32)


#: torch.manual_seed would also queue seeds for every accelerator, at 100 times the cost
_SEED: tuple[Callable[[int], object], ...] = (_torch.manual_seed, _seed_numpy, random.seed)


Peeks = tuple[torch.Tensor, object, tuple[object, float | None]]


def _peeks() -> Peeks:
    return _torch.get_state(), _peek_at_numpy(), _peek_random()


def _moved(before: Peeks, after: Peeks) -> list[bool]:
    return [not torch.equal(before[0], after[0]), before[1] != after[1], before[2] != after[2]]


class LazySeeds:
    """Seeds for the samples and the collation of a batch, for the generators that the data turn out to use."""

    def __init__(self) -> None:
        self._used = [False, False, False]  # torch, numpy, random
        self._seen: Peeks | None = None

    def samples(self, key: int, first: int, stride: int, indices: list[int], dataset: Any) -> list[Any]:
        """Return the samples at `indices` of `dataset`, each read as if it were alone in the world."""

        def plain() -> list[Any]:
            many = getattr(dataset, "__getitems__", None)
            return list(many(indices)) if many else [dataset[index] for index in indices]

        def seeded() -> list[Any]:
            samples = []
            for place, index in enumerate(indices):
                self._seed(mix(key, first + place * stride))
                samples.append(dataset[index])
            return samples

        return self._settle(_peeks(), plain, seeded)

    def collate(self, key: int, first: int, samples: list[Any], collate: Callable[[list[Any]], T]) -> T:
        """Return `collate(samples)` with the random numbers of the batch that starts at `first`."""

        def seeded() -> T:
            self._seed(mix(key ^ _COLLATE, first))
            return collate(samples)

        # Collating follows reading at once: what was seen after the one is there before the other.
        before, self._seen = self._seen or _peeks(), None
        return self._settle(before, lambda: collate(samples), seeded)

    def _settle(self, before: Peeks, plain: Callable[[], T], seeded: Callable[[], T]) -> T:
        """Call until no generator that was taken for unused has moved."""
        while True:
            result = seeded() if any(self._used) else plain()
            after = _peeks()
            used = [known or moved for known, moved in zip(self._used, _moved(before, after), strict=True)]
            if used == self._used:
                self._seen = after
                return result
            self._used, before = used, after

    def _seed(self, seed: int) -> None:
        for used, set_seed in zip(self._used, _SEED, strict=True):
            if used:
                set_seed(seed)


class MainGeneratorsKept:
    """Leaves the main process's generators as they were, for data that are read in it.

    Reading numpy's whole state costs 40 us, so it is read only when a look at its words says
    that they changed since the last read, or when a second gaussian is waiting beside them,
    which no look at the words can see being used up.
    """

    def __init__(self) -> None:
        self._numpy_words: object = None
        self._numpy_state: Any = None

    def __enter__(self) -> None:
        self._before = _peeks()
        words = self._before[1]
        if words != self._numpy_words or self._numpy_state["has_gauss"]:
            self._numpy_words, self._numpy_state = words, np.random.get_state(legacy=False)
            if self._numpy_state["has_gauss"]:
                # The data must not be served a number that the training step drew.
                np.random.set_state({**self._numpy_state, "has_gauss": 0, "gauss": 0.0})

    def __exit__(self, *_: object) -> None:
        torch_moved, numpy_moved, random_moved = _moved(self._before, _peeks())
        if torch_moved:
            _torch.set_state(self._before[0])
        if numpy_moved or self._numpy_state["has_gauss"]:
            np.random.set_state(self._numpy_state)
        if random_moved:
            _put_back_random(self._before[2])
