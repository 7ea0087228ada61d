"""Loaders that start anywhere in an epoch and give the same batches as if they had come there by walking."""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from midstride.engine.data.order import EvaluationOrder, Fetch, Order, TrainingOrder
from midstride.engine.data.random import LazySeeds, MainGeneratorsKept
from midstride.engine.errors import NotExact, UserCodeError, UserError
from midstride.engine.launchers.lifeline import die_with_parent
from midstride.engine.seeds import mix
from midstride.engine.world import World

__all__ = ["ExactLoader", "evaluation_loader", "training_loader"]


class _Fetched(list[Any]):
    """The samples of one batch, and where it starts, on their way to collate."""

    def __init__(self, samples: list[Any], key: int, first: int) -> None:
        super().__init__(samples)
        self.key, self.first = key, first


class _SeededDataset(Dataset[Any]):
    """The user's data set, each sample read with random numbers of its own."""

    def __init__(self, dataset: Any, seeds: LazySeeds) -> None:
        self.dataset = dataset
        self.seeds = seeds

    def __getattr__(self, name: str) -> Any:
        # worker_init_fn and friends look at `get_worker_info().dataset`. The guard is for unpickling.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Data sets that open a file in each worker are handed the file this way.
        if name in ("dataset", "seeds"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, fetch: Fetch) -> _Fetched:
        key, first, stride, indices = fetch
        try:
            return _Fetched(self.seeds.samples(key, first, stride, indices, self.dataset), key, first)
        except Exception as error:
            where = f"{type(self.dataset).__name__}, reading samples {_few(indices)}{_worker()}"
            raise UserCodeError.of(where, error) from error


class _SeededCollate:
    """The user's collate, with the random numbers of the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], seeds: LazySeeds) -> None:
        self.collate = collate
        self.seeds = seeds

    def __call__(self, samples: _Fetched) -> Any:
        try:
            return self.seeds.collate(samples.key, samples.first, list(samples), self.collate)
        except Exception as error:
            name = getattr(self.collate, "__name__", type(self.collate).__name__)
            raise UserCodeError.of(f"{name}, collating a batch of {len(samples)}{_worker()}", error) from error


class _TiedWorker:
    """Starts a worker as the user wants, and ties it to its rank: one that is killed must not leave it behind."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init
        self.rank_pid = os.getpid()

    def __call__(self, worker: int) -> None:
        if os.getppid() == self.rank_pid:  # not so under forkserver: there torch's own watch ends it, later
            die_with_parent(self.rank_pid)
        if self.init is not None:
            self.init(worker)


class _Places:
    """The batch sampler: what to fetch, from a place that is set before each pass."""

    def __init__(self, order: Order, key: int) -> None:
        self.order, self.key = order, key
        self.epoch = self.start = self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Fetch]:
        # No more than will be consumed: what workers fetch beyond a limit is time lost.
        return islice(self.order.fetches(mix(self.key, self.epoch), self.epoch, self.start), self.count)


class ExactLoader:
    """A DataLoader that can begin at any batch of any epoch.

    Args:
        loader: the user's loader; its data set, workers, collate and the rest are kept.
        order: which samples this rank reads.
        key: hash that sets this loader's random numbers apart from every other's.
        limit: a share of the batches, or a number of them.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, key: int, limit: float) -> None:
        self.order = order
        self.source = loader
        self._limit = limit
        self._places = _Places(order, key)
        self._in_main = loader.num_workers == 0
        self._kept = MainGeneratorsKept()
        self._loader = _rebuilt(loader, self._places, key)
        #: the batches of an epoch on the rank that has the most
        self.longest = len(self)

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of this rank."""
        return self.order.batch_size

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank, after the limit."""
        return self._limited(len(self.order))

    def _limited(self, batches: int) -> int:
        if isinstance(self._limit, int):
            return min(batches, self._limit)
        return int(batches * self._limit)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of `epoch` from batch `start` on."""
        count = len(self) - start
        if count <= 0:
            return
        self._places.epoch, self._places.start, self._places.count = epoch, start, count
        iterator = iter(self._loader)
        for _ in range(count):
            if self._in_main:
                with self._kept:
                    batch = next(iterator)
                yield batch
            else:
                yield next(iterator)


def training_loader(loader: DataLoader[Any], world: World, *, seed: int, shard: bool, limit: float) -> ExactLoader:
    """Return `loader` in DistributedSampler's order for `world`; `shard` gives every rank its own samples.

    Raises:
        NotExact: the loader's data set or sampler has no exact form here.
        UserError: there is nothing to train on.
    """
    samples, batch_size, drop_last = _sizes(loader, "train")
    size, rank = (world.size, world.rank) if shard else (1, 0)
    order = TrainingOrder(
        samples=samples,
        batch_size=batch_size,
        drop_last=drop_last,
        rank=rank,
        size=size,
        seed=seed,
        shuffle=isinstance(loader.sampler, RandomSampler),
    )
    exact = ExactLoader(loader, order, mix(seed, 0), limit)
    if len(exact) == 0:
        reason = (
            f"batch_size {batch_size} is larger than a rank's {order.rank_samples()} of {samples} samples, "
            "and drop_last=True leaves out what does not fill a batch: use a smaller batch or drop_last=False"
            if len(order) == 0
            else f"limit_train_batches={limit!r} of {len(order)} batches leaves none"
        )
        raise UserError(f"the training loader has no batch: {reason}.")
    return exact


def evaluation_loader(
    loader: DataLoader[Any], world: World, *, seed: int, stage: str, number: int, shard: bool, limit: float
) -> ExactLoader:
    """Return loader `number` of `stage` in order, every sample once over all ranks and none twice.

    Raises:
        NotExact: the loader's data set or sampler has no exact form here.
    """
    samples, batch_size, drop_last = _sizes(loader, stage)
    size, rank = (world.size, world.rank) if shard else (1, 0)
    order = EvaluationOrder(samples=samples, batch_size=batch_size, drop_last=drop_last, rank=rank, size=size)
    stages = ("validate", "test", "predict")
    return ExactLoader(loader, order, mix(mix(seed, 1 + stages.index(stage)), number), limit)


def _sizes(loader: DataLoader[Any], stage: str) -> tuple[int, int, bool]:
    """Return samples, batch size and drop_last of a loader whose order can be kept exactly."""
    if not isinstance(loader, DataLoader):
        raise UserError(f"the {stage} loader is a {type(loader).__name__}; a torch.utils.data.DataLoader is needed.")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise NotExact(
            f"the {stage} loader is a {type(loader).__name__} with an __iter__ of its own, which would be left out. "
            "Do in the data set or in collate_fn what it does."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise NotExact(
            f"the {stage} loader reads the iterable {type(loader.dataset).__name__}: its place cannot be kept "
            "exactly. Give it __len__ and __getitem__, so that a sample is found by its index."
        )
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        raise NotExact(
            f"the {stage} loader uses the batch sampler {type(loader.batch_sampler).__name__}: its order cannot be "
            "kept exactly. Use batch_size=, shuffle= and drop_last= instead."
        )
    sampler = loader.sampler
    plain = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler._num_samples is None
        and sampler.generator is None
    )
    if not plain:
        raise NotExact(
            f"the {stage} loader uses the sampler {type(sampler).__name__}: its order cannot be kept exactly. "
            "Use shuffle=True or shuffle=False; the run's seed decides the order."
        )
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if samples == 0:
        raise UserError(f"the {stage} data set {type(loader.dataset).__name__} has length 0: there is nothing to read.")
    return samples, loader.batch_size, loader.drop_last


def _rebuilt(loader: DataLoader[Any], places: _Places, key: int) -> DataLoader[Any]:
    seeds = LazySeeds()
    return DataLoader(
        _SeededDataset(loader.dataset, seeds),
        batch_sampler=places,  # type: ignore[arg-type]
        collate_fn=_SeededCollate(loader.collate_fn, seeds),  # type: ignore[arg-type]
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=_TiedWorker(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        # iter() draws from this generator: the main one must not be moved by a restart.
        generator=torch.Generator().manual_seed(key),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _few(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 4 else f"[{indices[0]}, {indices[1]}, ..., {indices[-1]}]"


def _worker() -> str:
    info = get_worker_info()
    return f", in worker {info.id}" if info else ""
