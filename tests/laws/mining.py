"""Loaders whose sampler reads what training writes."""

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from laws.lives import Samples, Tangled
from laws.loaded import Loaded, Ranked, Table
from torch import Tensor
from torch.utils.data import Sampler, Subset, WeightedRandomSampler


class ByScore(Sampler[int]):
    """The items by a score that no state of the sampler holds: whoever trains gives it."""

    def __init__(self, samples: int) -> None:
        self.samples, self.score = samples, float

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(self.samples), key=lambda index: (self.score(index), index)))


class Mining(Tangled):
    """Tells the sampler of its data what it has seen of each sample, as importance sampling does."""

    def on_fit_start(self) -> None:
        if isinstance(Mined.sampler, ByScore):
            Mined.sampler.score = self.score

    def score(self, index: int) -> float:
        return float(self.first.weight.detach().flatten()[index])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sampler = Mined.sampler
        parts = [batch[2].tolist()] * self.trainer.world.size
        if len(parts) > 1:
            torch.distributed.all_gather_object(parts, batch[2].tolist())
        for index in itertools.chain(*parts):
            if isinstance(sampler, WeightedRandomSampler):
                sampler.weights[index] = 1 + (index + batch_idx) % 7
            elif isinstance(sampler, Ranked):
                sampler.table.note(index)
        return super().training_step(batch, batch_idx)


class Mined(Loaded):
    """Its sampler hears of the training step."""

    module: ClassVar = Mining
    sampler: ClassVar[Any] = None

    def options(self, samples: Samples) -> dict[str, Any]:
        sampler = WeightedRandomSampler(torch.ones(len(samples), dtype=torch.double), len(samples))
        if samples is self.training:
            Mined.sampler = sampler
        return {"sampler": sampler}


class HardestFirst(Mined):
    def options(self, samples: Samples) -> dict[str, Any]:
        sampler = Ranked(Table(len(samples)))
        if samples is self.training:
            Mined.sampler = sampler
        return {"sampler": sampler}


class Labelling(Tangled):
    """Labels further samples after each epoch, as active learning does."""

    def on_train_epoch_end(self) -> None:
        pool = self.trainer.train_dataloader.dataset
        pool.indices.extend(range(len(pool.indices), len(pool.indices) + 7))


class Growing(Loaded):
    """A pool of samples that training extends."""

    module: ClassVar = Labelling

    def options(self, samples: Samples) -> dict[str, Any]:
        pool = Subset(Samples(60), [*range(len(samples) // 2 + 7)]) if samples is self.training else samples
        return {"dataset": pool, "shuffle": samples is self.training}


class ReadsTheModule(Mined):
    def options(self, samples: Samples) -> dict[str, Any]:
        sampler = ByScore(len(samples))
        if samples is self.training:
            Mined.sampler = sampler
        return {"sampler": sampler}
