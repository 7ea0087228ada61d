"""Iterable data sets and several loaders at once, one row each: a new kind is one more row.

Every row makes what `train_dataloader` returns, of samples that draw from every generator unless `noise` is 0.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from laws.lives import BATCH, SampleData, Samples, Tangled
from laws.loaded import Rewinding
from laws.whole_loaders import WHOLE
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, get_worker_info

from midstride.engine import CombinedLoader
from midstride.engine.world import World


class Stream(IterableDataset[Any]):
    """A plain generator, sharded over ranks and workers."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        self.samples = Samples(samples, noise)

    def indices(self) -> list[int]:
        """Return the samples of this worker of this rank."""
        world, info = World.from_environment(), get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return list(range(len(self.samples)))[world.rank * workers + worker :: world.size * workers]

    def __iter__(self) -> Iterator[Any]:
        for index in self.indices():
            yield self.samples[index]


class Shuffled(Stream):
    """A shuffle buffer, filled and emptied with `random`, and a generator of its own."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        super().__init__(samples, noise)
        self.draw = random.Random(3)

    def __iter__(self) -> Iterator[Any]:
        indices, buffer = self.indices(), list[int]()
        self.draw.shuffle(indices)
        for index in indices:
            buffer.append(index)
            if len(buffer) > 5:
                yield self.samples[buffer.pop(random.randrange(len(buffer)))]
        random.shuffle(buffer)
        yield from (self.samples[index] for index in buffer)


class Uneven(Stream):
    """Some shards end early; the first batch of each is there."""

    def indices(self) -> list[int]:
        indices, info = super().indices(), get_worker_info()
        cut = World.from_environment().rank % 2 + (info.id if info else 0) % 2
        return indices[: max(2, len(indices) - 5 * cut)]


class Remembering(Stream):
    """A generator that says where it is."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        super().__init__(samples, noise)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        indices = self.indices()
        while self.at < len(indices):
            self.at += 1
            yield self.samples[indices[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Cursor(Remembering):
    """Its own iterator, which `__iter__` sets back."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return self

    def __next__(self) -> Any:
        indices = self.indices()
        if self.at == len(indices):
            raise StopIteration
        self.at += 1
        return self.samples[indices[self.at - 1]]


class Drawn(IterableDataset[Any]):
    """Exposes its sampler and implements `__next__`."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        self.samples = Samples(samples, noise)
        self.sampler = RandomSampler(range(samples))

    def __iter__(self) -> Iterator[Any]:
        self.indices = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        return self.samples[next(self.indices)]


class Rewound(Drawn):
    """Has a sampler that is its own iterator."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        super().__init__(samples, noise)
        self.sampler = Rewinding(samples)


class Picky(Drawn):
    """Leaves some of its sampler's indices out, the first of all among them: so they do not say where it is."""

    def __iter__(self) -> Iterator[Any]:
        super().__iter__()
        next(self.indices)
        return self

    def __next__(self) -> Any:
        while (index := next(self.indices)) % 3 == 0:
            pass
        return self.samples[index]


NOISE = random.Random(8)


class Noisy(Stream):
    """Draws from a global, in a helper, for one sample in five."""

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(super().__iter__()):
            yield louder(sample) if number % 5 == 4 and self.samples.noise else sample


def louder(sample: Any) -> Any:
    return sample[0] + NOISE.random(), *sample[1:]


class Buffered(Remembering):
    """Mixes what it reads in a buffer that its state leaves out, as Hugging Face's `shuffle` does."""

    def __iter__(self) -> Iterator[Any]:
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 3:
                yield buffer.pop(self.at % 3)
        yield from buffer


class Arguing(Stream):
    """Its `state_dict` wants to be told how many samples were taken, as those of streaming libraries do."""

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        return {"at": num_samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("there is no such state")


class Failing(Remembering):
    """Gives a state that it does not take back."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("at")


class Late(Remembering):
    """From its tenth sample on its state is wrong."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at + (self.at > 9)}


class Batched(Stream):
    """Gives whole batches."""

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        for first in range(0, len(samples), BATCH):
            yield torch.utils.data.default_collate(samples[first : first + BATCH])


class Virtual(Shuffled):
    """Read as if by three workers, whatever the number of workers."""

    virtual_shards = 3


class Started(Stream):
    """Told by worker_init_fn where to start, and by set_epoch which epoch it is."""

    start, step, epoch = 0, 1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        world = World.from_environment()
        indices = range(self.start, len(self.samples), self.step)[world.rank :: world.size]
        yield from (self.samples[(index + self.epoch) % len(self.samples)] for index in indices)


def start(worker: int) -> None:
    """Deal the samples to the workers, as PyTorch's documentation does."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.start, dataset.step = worker, info.num_workers


def jittered(samples: list[Any]) -> Any:
    """Collate with a number drawn from `random`."""
    x, *rest = torch.utils.data.default_collate(samples)
    return [x + 0.01 * random.random(), *rest]


class Jittered:
    """Collates with numbers of a generator of its own."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(8)

    def __call__(self, samples: list[Any]) -> Any:
        x, *rest = torch.utils.data.default_collate(samples)
        return [x + 0.01 * self.draw.random(), *rest]


Make = Callable[[int, int, float], Any]


def over(kind: Callable[..., Any], **options: Any) -> Make:
    """Return a row: six batches for each rank, the last one not full, from (ranks, workers, noise)."""

    def make(ranks: int, workers: int, noise: float) -> DataLoader[Any]:
        more = {key: value for key, value in options.items() if workers or key not in ("persistent_workers",)}
        batch_size = more.pop("batch_size", BATCH)
        return DataLoader(kind(6 * BATCH * ranks - 2, noise), batch_size, num_workers=workers, **more)

    return make


ITERABLES: dict[str, Make] = {
    "generator": over(Stream, collate_fn=jittered),
    "shuffle buffer": over(Shuffled, persistent_workers=True),
    "uneven": over(Uneven),
    "state": over(Remembering, collate_fn=Jittered()),
    "iterator with state": over(Cursor, persistent_workers=True),
    "global generator": over(Noisy),
    "state without its buffer": over(Buffered),
    "state that wants arguments": over(Arguing),
    "state that is not taken back": over(Failing),
    "state that is wrong later": over(Late),
    "sampler": over(Drawn, persistent_workers=True),
    "sampler, its own iterator": over(Rewound),
    "sampler, picky": over(Picky),
    "batches of its own": over(Batched, batch_size=None),
    "full batches only": over(Stream, drop_last=True),
    "virtual shards": over(Virtual),
    "started": over(Started, worker_init_fn=start),
}


def maps(ranks: int, workers: int, noise: float) -> dict[str, Any]:
    """Return three loaders of different lengths and batch sizes, in a nest; the second is read in the main process."""
    return {
        "a": DataLoader(Samples(6 * BATCH * ranks - 2, noise), BATCH, shuffle=True, num_workers=workers),
        "b": [
            DataLoader(Samples(5 * ranks, noise), 2, shuffle=True),
            DataLoader(Samples(4 * BATCH * ranks, noise), BATCH, shuffle=True, num_workers=workers),
        ],
    }


def mixed(ranks: int, workers: int, noise: float) -> dict[str, Any]:
    """Return a loader and two iterables, one of them shorter and with a state."""
    short = DataLoader(Remembering(5 * ranks, noise), 2, num_workers=workers)
    return {"a": maps(ranks, workers, noise)["a"], "b": short, "c": ITERABLES["shuffle buffer"](ranks, workers, noise)}


NESTS: dict[str, Make] = {
    "dict": maps,
    "tuple": lambda *how: tuple(maps(*how)["b"]),
    **{
        mode: lambda *how, mode=mode: CombinedLoader(maps(*how), mode)
        for mode in ("min_size", "max_size", "sequential")
    },
    **{
        f"mixed, {mode}": lambda *how, mode=mode: CombinedLoader(mixed(*how), mode)
        for mode in ("min_size", "max_size_cycle", "max_size", "sequential")
    },
}


STREAMS = {**ITERABLES, **NESTS, **WHOLE}


class Several(Tangled):
    """Trains on whatever loaders a batch came from."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self.merged(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, _ = self.merged(batch)
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("val/loss", loss, sync_dist=True, add_dataloader_idx=False)

    @staticmethod
    def merged(batch: Any) -> list[Tensor]:
        """Return features, classes and indices of all samples in `batch`."""
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        return [torch.cat(tensors[part::3]) for part in range(3)]


class StreamData(SampleData):
    """A row to train on; to validate with, a loader and, in a nest, an iterable whose shards are uneven."""

    def __init__(self, kind: str, *setting: Any) -> None:
        super().__init__(*setting)
        self.kind = kind

    def train_dataloader(self) -> Any:
        return STREAMS[self.kind](self.ranks, self.workers, 0.1)

    def val_dataloader(self) -> Any:
        plain = super().val_dataloader()[0]
        return {"map": plain, "iterable": [DataLoader(Uneven(17), 2, num_workers=self.workers)]}
