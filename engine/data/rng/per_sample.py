"""Random numbers in the data that need no saved state.

Every sample is read with generators seeded by where it stands in the epoch, and every
batch is collated with generators seeded by where it starts. So prefetching, the number
of workers and restarts change nothing, and nothing per batch travels between processes.

Seeding three generators for every sample would cost more than a trivial data set, so it
is done lazily: a generator is taken for unused until a fetch is seen to have moved it;
then that fetch is done again with seeds, and from then on the generator is always seeded.
This asks of a data set that reading a sample twice gives the same sample twice. Generators
that the data set or the collate hold themselves are always seeded.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Literal, TypeVar

import torch

from midstride.engine.data.order import BatchRequest
from midstride.engine.data.read_memory import ReadMemory
from midstride.engine.data.rng.fast_state import SEED, RngReading, read_rng, rng_changed
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.data.rng.owned_generators import OwnedGenerators, Seeders
from midstride.engine.data.rng.repeatability import collate_name, copied, ensure_same_batch, is_repeatable
from midstride.engine.data.torch_internals import worker_info
from midstride.engine.errors import NotExact
from midstride.engine.seeds import mix

__all__ = ["IsolatedReads", "Rng", "SampleSeeder"]

#: "lazy": numbers of its own for every sample, by whom it is read as may be; "batch": one seed for a whole batch
Rng = Literal["lazy", "batch"]
T = TypeVar("T")
log = logging.getLogger(__name__)
_COLLATE = (1 << 64) - 1  # sets a batch's seed for collate apart from its samples'


_NOT_REPEATABLE = (
    "{dataset}[{index!r}] gave another sample when it was read again with the same seeds: it counts its calls, or "
    "draws from a generator that cannot be found. Draw from torch, numpy.random, random or a generator that is an "
    "attribute; or give the data set a method reseed(seed); or say rng='batch', which reads every sample only once."
)


_KEEPS = (
    "{dataset} draws random numbers when it is first read and none when it is read again: it keeps what it drew, and a "
    "resumed run, or another worker, would draw it anew. Draw what is kept in __init__, with a seed."
)
_COLLATED_ONCE = "Keep what it counts in the module; or say rng='batch', which collates every batch only once."
_REMEMBERS = (
    "{collate} of {dataset} gave another batch than where nothing was read before it: reading changes what they hold "
    "({what}), in each worker for itself, and no snapshot holds that. A resumed run, and each worker, would begin "
    "without it. Make it in __init__, keep it in the module, or read with num_workers=0, where it is kept."
)


class SampleSeeder:
    """Seeds of the samples and the collation of a batch, for the generators that the data turn out to use.

    Args:
        rng: what a seed is for.
        shared: whether workers will have copies of this.
    """

    def __init__(self, rng: Rng = "lazy", *, shared: bool = False) -> None:
        self._rng = rng
        self._used = [False, False, False]  # torch, numpy, random
        self._dataset_generators = OwnedGenerators()
        self._collate_generators = OwnedGenerators()
        #: the last look at the generators, if nothing can have moved them since: a look costs 8 us
        self.last_reading: RngReading | None = None
        #: whether nothing has drawn so far: then one look, after collate, is for a whole batch
        self.draws_nothing = False
        self._unseen: tuple[RngReading, Any] | None = None
        #: what reading leaves behind, in a worker
        self.memory: ReadMemory | None = None
        self._collate_drew = torch.zeros(1, dtype=torch.bool)
        if shared:
            self._collate_drew.share_memory_()

    @property
    def collate_drew(self) -> bool:
        """Whether collate was seen to draw random numbers, here or in any worker."""
        return bool(self._collate_drew)

    def set_collate_drew(self, drew: bool) -> None:
        """Have collate count as seen to draw random numbers, in every worker; or as not seen."""
        self._collate_drew.fill_(drew)

    def watch_memory(self, memory: ReadMemory | None) -> None:
        """Look at what reading leaves behind, in the workers that are started next."""
        self.memory = memory

    def generators_of(self, dataset: Any, collate: Any) -> list[Any]:
        """Return the generators that the data set and the collate hold themselves."""
        return [*self._dataset_generators.generators_of(dataset), *self._collate_generators.generators_of(collate)]

    def samples(self, fetch: BatchRequest, dataset: Any) -> list[Any]:
        """Return the samples of one batch, each read as if it were alone in the world.

        Raises:
            NotExact: read again with the same seeds, a sample was another.
        """
        if self.draws_nothing and not fetch.probe:
            self._unseen = self.last_reading or read_rng(), dataset
            return _read(dataset, fetch.indices)
        seeders = self._dataset_generators.of(dataset)
        if self._rng == "batch":
            self._used, self.last_reading = [True, True, True], None
            self._seed(mix(fetch.key, fetch.first), seeders)
            return _read(dataset, fetch.indices)

        def one(number: int) -> Any:
            return self._read_seeded(dataset, fetch, [number], seeders)[0]

        def plain() -> list[Any]:
            return _read(dataset, fetch.indices)

        def seeded() -> list[Any]:
            return self._read_seeded(dataset, fetch, range(len(fetch.indices)), seeders)

        before, self.last_reading = self.last_reading or read_rng(), None
        known = list(self._used)
        samples = self._settle(before, plain, seeded, seeders)
        self._check_draws(known, one, fetch, seeders, dataset)
        if self._dataset_generators.grew(dataset):  # generators made at the first reading
            seeders = self._dataset_generators.of(dataset)
            samples, self.last_reading = seeded(), None
        for number in range(fetch.probe):
            self._compare(samples[number], one(number), dataset, fetch.indices[number])
        return samples

    def _read_seeded(self, dataset: Any, fetch: BatchRequest, numbers: Sequence[int], seeders: Seeders) -> list[Any]:
        """Return the samples of `numbers` in the batch, each read with seeds of its own; in line, as there are many."""
        many, main = getattr(dataset, "__getitems__", None), [*compress(SEED, self._used)]
        samples = []
        for number in numbers:
            seed, index = mix(fetch.key, fetch.first + number * fetch.stride), fetch.indices[number]
            for set_seed in main:
                set_seed(seed)
            for position, set_seed in enumerate(seeders):
                set_seed(mix(seed, position))
            samples.append(many([index])[0] if many else dataset[index])
        return samples

    def _check_draws(
        self, known: list[bool], one: Callable[[int], Any], fetch: BatchRequest, seeders: Seeders, dataset: Any
    ) -> None:
        """Refuse a data set that moved a generator not `known` before, and moves none when `fetch` is read again."""
        if self._used == known:
            return
        self.last_reading = None
        for number in range(len(fetch.indices)):
            one(number)
            after = read_rng()
            self._seed(mix(fetch.key, fetch.first + number * fetch.stride), seeders)
            if any(rng_changed(read_rng(), after)):
                return
        raise NotExact(_KEEPS.format(dataset=type(dataset).__name__))

    def _compare(self, sample: Any, again: Any, dataset: Any, index: Any) -> None:
        self.last_reading = None
        if not is_repeatable(sample, again):
            raise NotExact(_NOT_REPEATABLE.format(dataset=type(dataset).__name__, index=index))

    def collate(self, fetch: BatchRequest, samples: list[Any], collate: Callable[[list[Any]], T]) -> T:
        """Return `collate(samples)` with the random numbers of the batch."""
        if self._unseen is not None:
            (before, dataset), self._unseen = self._unseen, None
            batch = collate(samples)
            after = read_rng()
            if before == after:
                self.last_reading = before  # the same object: who compares it with the look before need not read it
                return batch
            self.last_reading = after
            self.draws_nothing = False
            samples = self.samples(fetch, dataset)
        seeders = self._collate_generators.of(collate)
        seed = mix(fetch.key ^ _COLLATE, fetch.first)
        if self._rng == "batch":
            self._seed(seed, seeders)
            return collate(samples)

        def seeded() -> T:
            self._seed(seed, seeders)
            if self.collate_drew:
                return collate(samples)
            before = read_rng()
            batch = collate(samples)
            self.set_collate_drew(bool(seeders) or any(rng_changed(before, read_rng())))
            return batch

        given = copied(samples) if fetch.probe else None
        # Collating follows reading at once: what was seen after the one is there before the other.
        before, self.last_reading = self.last_reading or read_rng(), None
        batch = self._settle(before, lambda: collate(samples), seeded, seeders)
        self.draws_nothing = not (seeders or self._dataset_generators.seeders or any(self._used))
        if given is not None:
            self.last_reading = None
            self._seed(seed, seeders)
            ensure_same_batch(collate, batch, collate(given), way_out=_COLLATED_ONCE)
        return batch

    def check_memory(self, fetch: BatchRequest, batch: Any, collate: Callable[[Any], Any], *, single: bool) -> None:
        """Refuse data that give another batch in a worker that has read others, where they remember anything.

        Raises:
            NotExact: naming what they remember.
        """
        memory = self.memory
        if memory is None or not memory.is_due():
            return
        if (what := memory.changed()) is not None and (given := copied(batch)) is not None:
            with memory.reverted():
                memory.forget()
                samples = self.samples(fetch._replace(probe=0), memory.dataset)
                again = self.collate(fetch._replace(probe=0), samples[0] if single else samples, collate)
            if not is_repeatable(given, again):
                names = {"collate": collate_name(collate), "dataset": type(memory.dataset).__name__}
                raise NotExact(_REMEMBERS.format(**names, what=what))
        if worker_info().id == 0 and (counted := memory.counted()) is not None:  # each would say it
            log.warning(
                "reading changes what %s or its code holds, in each worker for itself, and no snapshot holds that: %s. "
                "A resumed run, and each worker, begins without it: where it decides what is read, keep it in an "
                "attribute of the data set, and read with num_workers=0",
                type(memory.dataset).__name__,
                counted,
            )

    def _settle(self, before: RngReading, plain: Callable[[], T], seeded: Callable[[], T], seeders: Seeders) -> T:
        """Call until no generator that was taken for unused has moved."""
        while True:
            result = seeded() if seeders or any(self._used) else plain()
            after = read_rng()
            used = [known or moves for known, moves in zip(self._used, rng_changed(before, after), strict=True)]
            if used == self._used:
                self.last_reading = after
                return result
            self._used, before = used, after

    def _seed(self, seed: int, seeders: Seeders) -> None:
        for set_seed in compress(SEED, self._used):
            set_seed(seed)
        for number, set_seed in enumerate(seeders):
            set_seed(mix(seed, number))


class IsolatedReads:
    """Puts back, after each block, the generators of the process and of the data: a snapshot must not show who reads.

    Args:
        seeds: of what is read in the blocks.
        isolation: of the process's generators.
        dataset: that is read.
        collate: that makes its batches.
    """

    def __init__(self, seeds: SampleSeeder, isolation: RngIsolation, dataset: Any, collate: Any) -> None:
        self._seeds, self._isolation, self._dataset, self._collate = seeds, isolation, dataset, collate

    def __enter__(self) -> None:
        """Note where the generators stand."""
        seeds, isolation = self._seeds, self._isolation
        isolation.include(() if seeds.draws_nothing else seeds.generators_of(self._dataset, self._collate))
        isolation.__enter__()
        seeds.last_reading = isolation.before

    def __exit__(self, kind: object, *_: object) -> None:
        """Put them back."""
        seeds = self._seeds
        after, seeds.last_reading = seeds.last_reading if kind is None else None, None
        self._isolation.restore(after)


def _read(dataset: Any, indices: list[Any]) -> list[Any]:
    many = getattr(dataset, "__getitems__", None)
    return list(many(indices)) if many else [dataset[index] for index in indices]
