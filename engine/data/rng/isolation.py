"""Restores the main process's generators after data were read in it."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from midstride.engine.data.rng.fast_state import (
    RngReading,
    read_rng,
    restore_numpy,
    restore_random,
    restore_torch,
    rng_changed,
    seed_generators,
)
from midstride.engine.objects.kinds.generators import get_state, set_state

__all__ = ["RngIsolation", "seeded_rng"]


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed torch, numpy and `random` in the block, and restore them after it."""
    before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    seed_generators(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class RngIsolation:
    """Restores the main process's generators, and the data's, after data were read.

    Reading numpy's whole state costs 40 us. So it is read only if its words have changed since the last reading, or if
    a gaussian is cached, whose use does not show in the words.
    """

    def __init__(self) -> None:
        self._numpy_words: object = None
        self._numpy_state: Any = None
        self._owned: Sequence[Any] = ()
        self._owned_states: Sequence[Any] = ()
        #: reading at the start of the block
        self.before: RngReading

    def include(self, owned: Sequence[Any]) -> None:
        """Restore these generators too, from the next block on, instead of earlier ones."""
        self._owned = owned

    def __enter__(self) -> "RngIsolation":
        self._owned_states = [get_state(generator) for generator in self._owned]
        self.before = read_rng()
        words = self.before[1]
        if words != self._numpy_words or self._numpy_state["has_gauss"]:
            self._numpy_words, self._numpy_state = words, np.random.get_state(legacy=False)
            if self._numpy_state["has_gauss"]:
                # The data must not get a gaussian that was cached by the training step.
                np.random.set_state({**self._numpy_state, "has_gauss": 0, "gauss": 0.0})
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self, after: RngReading | None = None) -> None:
        """Restore the generators to the block's start; `after` is a still valid reading, or None."""
        try:
            for generator, state in zip(self._owned, self._owned_states, strict=True):
                set_state(generator, state)
        finally:
            self._restore_main(after)

    def _restore_main(self, after: RngReading | None) -> None:
        if after is self.before and not self._numpy_state["has_gauss"]:
            return
        torch_moved, numpy_moved, random_moved = rng_changed(self.before, after or read_rng())
        if torch_moved:
            restore_torch(self.before[0])
        if self._numpy_state["has_gauss"] or (numpy_moved and not restore_numpy(self.before[1])):
            np.random.set_state(self._numpy_state)
        if random_moved:
            restore_random(self.before[2])
