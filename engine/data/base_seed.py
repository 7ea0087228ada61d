"""The base seed that a `DataLoader` draws from its generator at the start of an epoch, which a sampler may share."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from midstride.engine.objects.generator_search import find_generators

__all__ = ["BaseSeed"]


class BaseSeed:
    """Iterates over a sampler as `DataLoader.__iter__` does, which first draws a seed for its workers.

    Args:
        loader: loader that draws the seed from its generator.
        sampler: sampler of the loader, which may share that generator.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._dataset = loader.dataset
        used = find_generators(sampler, beside=self._dataset).items() if loader.generator is not None else ()
        self._path = next((path for path, generator in used if generator is loader.generator), None)
        #: persistent workers keep their seed; a run that goes on with other workers draws as those it began with did
        self._is_drawn_once = loader.persistent_workers and loader.num_workers > 0
        #: whether the loader calls `iter(sampler)` before it draws the seed
        self._is_asked_first = loader.batch_sampler is None or loader.batch_sampler is sampler

    def iterate(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """Return an iterator over `sampler`, which is the loader's or a copy of it, for `epoch`."""
        if self._path is None or (epoch and self._is_drawn_once):
            return iter(sampler)
        items = iter(sampler) if self._is_asked_first else None
        generator = find_generators(sampler, beside=self._dataset)[self._path]
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        return iter(sampler) if items is None else items

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of the samples depends on; nothing if the sampler does not share the generator."""
        return {} if self._path is None else {"is_drawn_once": self._is_drawn_once}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on drawing as the loader did whose state it is; those of older snapshots do not tell."""
        self._is_drawn_once = state_dict.get("is_drawn_once", self._is_drawn_once)
