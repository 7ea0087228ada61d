"""Kinds of loaders: samplers, batch samplers, collates, workers."""

import itertools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from laws.lives import BATCH, SampleData, Samples
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

Batch = tuple[Tensor, Tensor, Tensor]


class Loaded(SampleData):
    """Data whose loaders a row describes by `options`."""

    #: where this is one of several ranks without a process group
    rank = 0

    def options(self, samples: Samples) -> dict[str, Any]:
        return {"shuffle": True}

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.training, BATCH)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [self.loader(samples, 2) for samples in self.validation]

    def loader(self, samples: Samples, batch_size: int) -> DataLoader[Any]:
        given = self.options(samples)
        batching = {} if {"batch_sampler", "batch_size"} & given.keys() else {"batch_size": batch_size}
        return DataLoader(given.pop("dataset", samples), num_workers=self.workers, **batching, **given)


class InOrder(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"drop_last": True}


class OwnGenerator(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"shuffle": True, "generator": torch.Generator().manual_seed(11)}


class Replaced(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": RandomSampler(samples, replacement=True, num_samples=len(samples) + 5)}


class Weighted(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": WeightedRandomSampler(np.arange(1.0, 1 + len(samples)), len(samples))}


class WeightedByGenerator(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        return {"sampler": WeightedRandomSampler(torch.ones(len(samples)), len(samples), generator=generator)}


class Part(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": SubsetRandomSampler(range(1, len(samples)))}


class Distributed(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        world = {} if torch.distributed.is_initialized() else {"num_replicas": self.ranks, "rank": self.rank}
        return {"sampler": DistributedSampler(samples, seed=4, drop_last=self.ranks > 1, **world)}


class Wandering(Sampler[int]):
    """Where an epoch begins depends on those before it; draws from a generator of its own and from the main one."""

    def __init__(self, samples: int) -> None:
        self.samples, self.begun, self.order = samples, 0, list(range(samples))
        self.generator = np.random.default_rng(9)

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        self.generator.shuffle(self.order)
        start = (self.begun * 7 + random.randrange(self.samples)) % self.samples
        yield from self.order[start:] + self.order[:start]


class Hidden(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": Wandering(len(samples))}


class Epochs(Sampler[int]):
    """Is told the epoch; has no length."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.samples))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class ToldTheEpoch(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": Epochs(len(samples))}


class Rewinding(Sampler[int]):
    """Is its own iterator: each `iter` starts over, in another order."""

    def __init__(self, samples: int) -> None:
        self.samples, self.passes, self.at = samples, 0, samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        self.passes, self.at = self.passes + 1, 0
        return self

    def __next__(self) -> int:
        if self.at == self.samples:
            raise StopIteration
        self.at += 1
        return (self.at + 5 * self.passes) % self.samples


class OwnIterator(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": Rewinding(len(samples))}


class Speaking(Sampler[int]):
    """Keeps its state where nobody finds it, and says it."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epochs = samples, itertools.count()

    def state_dict(self) -> dict[str, Any]:
        epoch = next(self.epochs)
        self.load_state_dict({"epoch": epoch})
        return {"epoch": epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = itertools.count(state["epoch"])

    def __iter__(self) -> Iterator[int]:
        start = next(self.epochs) * 5
        return iter([(start + number) % self.samples for number in range(self.samples)])


class SaysItself(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": Speaking(len(samples))}


class Buckets(Sampler[list[int]]):
    """Batches of two to five samples, mixed by the main generator; every epoch begins one sample later."""

    def __init__(self, samples: int) -> None:
        self.samples, self.begun = samples, 0

    def __len__(self) -> int:
        return -(-self.samples * 2 // 7)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples).tolist()
        self.begun += 1
        order = order[self.begun :] + order[: self.begun]
        for size in itertools.cycle((2, 5)):
            yield [order.pop() for _ in range(min(size, len(order)))]
            if not order:
                return


class Bucketed(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"batch_sampler": Buckets(len(samples))}


class Tokens(Sampler[list[int]]):
    """Batches of at most 24 tokens; how many an epoch has follows from its order. Every epoch takes one sample more."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batch, tokens = list[int](), 0
        order = random.Random(self.epoch).sample(range(self.samples), self.samples)
        for index in [*order, *order[: self.epoch]]:
            if tokens + 3 + index % 8 > 24:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += 3 + index % 8
        yield batch


class ByTokens(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"batch_sampler": Tokens(len(samples))}


class Forever(Sampler[int]):
    """Does not end; a pass goes on where the one before was left."""

    def __init__(self, samples: int) -> None:
        self.samples, self.generator = samples, torch.Generator().manual_seed(8)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(self.samples, (), generator=self.generator))


class Endless(Loaded):
    limit: ClassVar = 5

    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": Forever(len(samples))} if samples is self.training else {}


class SaysPosition(Sampler[int]):
    """Says how many items it gave, and resumes with the rest of them; draws from a generator that it makes late."""

    given = skip = 0
    generator: torch.Generator | None = None

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator().manual_seed(6)
        self.begun = self.generator.get_state()
        order = torch.randperm(self.samples, generator=self.generator).tolist()
        self.given, self.skip = self.skip, 0
        for index in order[self.given :]:
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        if self.generator is None:
            raise RuntimeError("not started yet")
        return {"given": self.given, "generator": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip, self.generator = state["given"], torch.Generator()
        self.generator.set_state(state["generator"])


class Positioned(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"sampler": SaysPosition(len(samples))}


class Batched(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"batch_sampler": BatchSampler(Wandering(len(samples)), BATCH, drop_last=False)}


class Bundles(Dataset[Batch]):
    """Every item is a batch."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples) // BATCH

    def __getitem__(self, index: int) -> Batch:
        found: Batch = default_collate([self.samples[BATCH * index + number] for number in range(BATCH)])
        return found


class Unbatched(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"dataset": Bundles(samples), "batch_size": None, "shuffle": True}


class Many(Dataset[Batch]):
    """Is asked for many samples by one list."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: Any) -> Batch:
        found: Batch = default_collate([self.samples[index] for index in indices])
        return found


class AskedByLists(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        sampler = BatchSampler(RandomSampler(samples), BATCH, drop_last=True)
        return {"dataset": Many(samples), "sampler": sampler, "batch_size": None}


def noisy(samples: list[Any]) -> Batch:
    x, y, index = default_collate(samples)
    return x + 0.1 * (torch.randn(6) + random.gauss(0, 1) + float(np.random.normal())), y, index


class RandomCollate(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"shuffle": True, "collate_fn": noisy}


class Blur:
    def __init__(self) -> None:
        self.generators = [np.random.default_rng(1), np.random.RandomState(2), random.Random(3)]
        self.torch = {"generator": torch.Generator().manual_seed(4)}

    def __call__(self, x: Tensor) -> Tensor:
        first, second, third = (float(g.random()) for g in self.generators)
        return x + first + second + third + torch.rand(6, generator=self.torch["generator"])


class Blurred(Samples):
    """Draws from generators of its own, two levels down."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.transforms = [Blur()]

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        x, y, index = super().__getitem__(index)
        return self.transforms[0](x), y, index


class Held(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"dataset": Subset(Blurred(len(samples)), range(len(samples))), "shuffle": True}


class Chaotic(Samples):
    """Draws from what nobody can find, and has a hook for it."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.state = iter([0.5] * 100)

    def reseed(self, seed: int) -> None:
        self.state = iter([seed % 997 / 997] * 100)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        x, y, index = super().__getitem__(index)
        return x + next(self.state), y, index


class Reseeded(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        return {"dataset": Chaotic(len(samples)), "shuffle": True}


class Persistent(Loaded):
    def options(self, samples: Samples) -> dict[str, Any]:
        more = {"persistent_workers": True, "prefetch_factor": 5} if self.workers else {}
        return {"shuffle": True, "worker_init_fn": drawing, **more}


class Ranked(Sampler[Any]):
    """The items by what is remembered of them; an item is a tuple."""

    def __init__(self, table: "Table") -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table.losses)

    def __iter__(self) -> Iterator[Any]:
        yield from sorted(self.table.losses, key=lambda index: (-self.table.losses[index], index))


class Table:
    """Keeps losses; in slots, with a generator of its own."""

    __slots__ = ("generator", "losses")

    def __init__(self, samples: int) -> None:
        self.losses = {index: 0.0 for index in range(samples)}
        self.generator = random.Random(4)

    def note(self, index: int) -> None:
        self.losses[index] = self.losses[index] / 2 + self.generator.random()


def drawing(worker: int) -> None:
    """What many write against alike workers."""
    np.random.seed(torch.initial_seed() % 2**32)
    random.random()
