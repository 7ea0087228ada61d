"""The number that a `DataLoader` draws from its generator as an epoch begins, ahead of a sampler that shares it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from midstride.engine.objects.generators import find_generators

__all__ = ["BaseSeed"]


class BaseSeed:
    """Has a sampler give what it gives in `DataLoader.__iter__`, which draws a seed for its workers first.

    Args:
        loader: whose generator is drawn from.
        sampler: that may share it.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._dataset = loader.dataset
        used = find_generators(sampler, beside=self._dataset).items() if loader.generator is not None else ()
        self._path = next((path for path, generator in used if generator is loader.generator), None)
        #: workers that stay keep their seed
        self._is_drawn_once = loader.persistent_workers and loader.num_workers > 0
        #: what gives the loader its batches is asked for an iterator before the seed is drawn
        self._is_asked_first = loader.batch_sampler is None or loader.batch_sampler is sampler

    def iterate(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """Return what `sampler`, the one of the loader or a copy, gives in `epoch`."""
        if self._path is None or (epoch and self._is_drawn_once):
            return iter(sampler)
        items = iter(sampler) if self._is_asked_first else None
        generator = find_generators(sampler, beside=self._dataset)[self._path]
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        return iter(sampler) if items is None else items
