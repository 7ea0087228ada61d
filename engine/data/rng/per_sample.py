"""Seeds the random numbers of each sample, so that they need no saved state.

Every sample is read with generators seeded by its position in the epoch, and every batch is collated with generators
seeded by the position of its first sample. So random numbers do not depend on prefetching, the number of workers and
restarts.

To seed three generators for every sample would cost more than reading a trivial data set. So a generator is considered
unused until its state has changed in a reading; the samples are then read again with seeds, and the generator is always
seeded from then on. That requires that reading a sample twice gives the same. Generators that the data set or the
collate_fn hold are always seeded.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Literal, TypeVar

import torch

from midstride.engine.data.order import BatchRequest
from midstride.engine.data.read_side_effects import ReadSideEffects
from midstride.engine.data.rng.fast_state import SEED, RngReading, read_rng, rng_changed
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.data.rng.owned_generators import OwnedGenerators, Seeders
from midstride.engine.data.rng.repeatability import collate_name, copied, ensure_same_batch, is_repeatable
from midstride.engine.data.torch_internals import worker_info
from midstride.engine.data.worker_memory import share
from midstride.engine.errors import EngineError, NotExact
from midstride.engine.seeds import mix

__all__ = ["IsolatedReads", "Rng", "SampleSeeder"]

#: "lazy": random numbers of its own for every sample, seeded if they are used; "batch": one seed for a whole batch
Rng = Literal["lazy", "batch"]
T = TypeVar("T")
log = logging.getLogger(__name__)
_COLLATE = (1 << 64) - 1  # makes the seed for collate_fn differ from those of samples


_NOT_REPEATABLE = (
    "{dataset}[{index!r}] gave another sample when it was read again with the same seeds: it counts its calls, or "
    "draws from an unknown generator. Draw from torch, numpy.random, random or a generator that is an "
    "attribute; or give the data set a method reseed(seed); or set rng='batch', which reads every sample only once."
)


_CACHES_DRAWS = (
    "{dataset} draws random numbers when it is first read and none when it is read again: it keeps the drawn values, "
    "and a resumed run or another worker would draw new ones. Draw them in __init__, with a seed."
)
_COLLATED_ONCE = "Count in training_step or set rng='batch' and num_workers=0, where a resumed run continues its count."
_KEEPS_STATE = (
    "{collate} of {dataset} returned another batch than without earlier reads: reading changes their state ({what}), "
    "separately in each worker and in no snapshot. A resumed run and each new worker would start without it. Make it "
    "in __init__, keep it in the module, or read with num_workers=0, where it is kept."
)

_NOT_CHECKED = (
    "reading changes what the data hold in a worker (%s), and whether batches depend on that could not be tested: "
    "read again without it, they raised %s. An open file or database is harmless. If it affects the samples, make it "
    "in __init__, or read with num_workers=0"
)


class SampleSeeder:
    """Reads and collates batches, with the generators seeded that the data use.

    Args:
        rng: whether each sample or each batch is seeded.
        shared: whether workers will get copies of this object.
    """

    def __init__(self, rng: Rng, *, shared: bool) -> None:
        self._rng = rng
        self._used = [False, False, False]  # torch, numpy, random
        self._dataset_generators = OwnedGenerators()
        self._collate_generators = OwnedGenerators()
        #: the last reading of the generators, if they cannot have changed since; a reading costs 8 us
        self.last_reading: RngReading | None = None
        #: whether no generator was used so far: then there is one reading for a whole batch, after collate_fn
        self.draws_nothing = False
        self._unseen: tuple[RngReading, Any] | None = None
        #: in a worker, finds side effects of reading
        self.side_effects: ReadSideEffects | None = None
        self._collate_drew = torch.zeros(1, dtype=torch.bool)
        if shared:
            share(self._collate_drew)

    @property
    def collate_drew(self) -> bool:
        """Whether collate_fn has drawn random numbers, here or in any worker."""
        return bool(self._collate_drew)

    def set_collate_drew(self, drew: bool) -> None:
        """Set `collate_drew`, for all workers."""
        self._collate_drew.fill_(drew)

    def watch_side_effects(self, side_effects: ReadSideEffects | None) -> None:
        """Set the monitor of side effects for workers that are started next; None for no checks."""
        self.side_effects = side_effects

    def generators_of(self, dataset: Any, collate: Any) -> list[Any]:
        """Return the generators that data set and collate_fn hold."""
        return [*self._dataset_generators.generators_of(dataset), *self._collate_generators.generators_of(collate)]

    def samples(self, fetch: BatchRequest, dataset: Any) -> list[Any]:
        """Return the samples of one batch, each of which is independent of the others.

        Raises:
            NotExact: a sample that was read again with the same seeds differed.
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
        samples = self._read_until_settled(before, plain, seeded, seeders)
        self._check_draws(known, one, fetch, seeders, dataset)
        if self._dataset_generators.has_grown(dataset):  # generators that the first reading has created
            seeders = self._dataset_generators.of(dataset)
            samples, self.last_reading = seeded(), None
        for number in range(fetch.probe):
            self._compare(samples[number], one(number), dataset, fetch.indices[number])
        return samples

    def _read_seeded(self, dataset: Any, fetch: BatchRequest, numbers: Sequence[int], seeders: Seeders) -> list[Any]:
        """Return the batch's samples of `numbers`, each read with its seeds; inlined for speed."""
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
        """Check that a data set that used an unknown generator uses one as `fetch` is read again."""
        if self._used == known:
            return
        self.last_reading = None
        for number in range(len(fetch.indices)):
            one(number)
            after = read_rng()
            self._seed(mix(fetch.key, fetch.first + number * fetch.stride), seeders)
            if any(rng_changed(read_rng(), after)):
                return
        raise NotExact(_CACHES_DRAWS.format(dataset=type(dataset).__name__))

    def _compare(self, sample: Any, again: Any, dataset: Any, index: Any) -> None:
        self.last_reading = None
        if not is_repeatable(sample, again):
            raise NotExact(_NOT_REPEATABLE.format(dataset=type(dataset).__name__, index=index))

    def collate(self, fetch: BatchRequest, samples: list[Any], collate: Callable[[list[Any]], T]) -> T:
        """Return `collate(samples)`, with generators seeded for the batch.

        Raises:
            NotExact: it differed when it was called again with the same samples and seeds.
        """
        if self._unseen is not None:
            (before, dataset), self._unseen = self._unseen, None
            batch = collate(samples)
            after = read_rng()
            if before == after:
                self.last_reading = before  # the same object, so that a comparison by identity suffices
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
        # Nothing runs between reading and collating, so the last reading is still valid.
        before, self.last_reading = self.last_reading or read_rng(), None
        batch = self._read_until_settled(before, lambda: collate(samples), seeded, seeders)
        self.draws_nothing = not (seeders or self._dataset_generators.seeders or any(self._used))
        if given is not None:
            self.last_reading = None
            self._seed(seed, seeders)
            ensure_same_batch(collate, batch, collate(given), way_out=_COLLATED_ONCE)
        return batch

    def check_side_effects(
        self, fetch: BatchRequest, batch: Any, collate: Callable[[Any], Any], *, single: bool
    ) -> None:
        """Check that a batch in a worker does not depend on side effects of earlier readings.

        Raises:
            NotExact: it does; the changed value is named.
        """
        side_effects = self.side_effects
        if side_effects is None or not side_effects.is_due():
            return
        if (what := side_effects.changed()) is not None and (given := copied(batch)) is not None:
            try:
                with side_effects.reverted():
                    side_effects.reset()
                    samples = self.samples(fetch._replace(probe=0), side_effects.dataset)
                    again = self.collate(fetch._replace(probe=0), samples[0] if single else samples, collate)
            except Exception as error:
                self._stop_checking(error, what)
                return
            if not is_repeatable(given, again):
                names = {"collate": collate_name(collate), "dataset": type(side_effects.dataset).__name__}
                raise NotExact(_KEEPS_STATE.format(**names, what=what))
        if (
            worker_info().id == 0 and (changing := side_effects.changing_value()) is not None
        ):  # else each worker would warn
            log.warning(
                "reading changes what %s or its code holds, in each worker for itself, and no snapshot holds that: %s. "
                "A resumed run and each new worker start without it. If it affects the samples, keep it in an "
                "attribute of the data set and set num_workers=0",
                type(side_effects.dataset).__name__,
                changing,
            )

    def _stop_checking(self, error: Exception, what: str) -> None:
        """Stop checking side effects, since data that no new worker can read raised `error`.

        One reason is a database that a process may open only once.

        Raises:
            EngineError: `error`, if it is one.
        """
        if isinstance(error, EngineError):
            raise error
        if worker_info().id == 0:
            log.warning(_NOT_CHECKED, what, f"{type(error).__name__}: {error}")
        self.side_effects = None

    def _read_until_settled(
        self, before: RngReading, plain: Callable[[], T], seeded: Callable[[], T], seeders: Seeders
    ) -> T:
        """Call `plain` or `seeded` until no generator deemed unused changes; return the result."""
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
    """Restores the generators of process and data after each block, so that reading is pure.

    Args:
        seeds: seeds the generators in the blocks.
        isolation: restores the generators of the process.
        dataset: data set that is read.
        collate: its collate_fn.
    """

    def __init__(self, seeds: SampleSeeder, isolation: RngIsolation, dataset: Any, collate: Any) -> None:
        self._seeds, self._isolation, self._dataset, self._collate = seeds, isolation, dataset, collate

    def __enter__(self) -> None:
        """Record the states of the generators."""
        seeds, isolation = self._seeds, self._isolation
        isolation.include(() if seeds.draws_nothing else seeds.generators_of(self._dataset, self._collate))
        isolation.__enter__()
        seeds.last_reading = isolation.before

    def __exit__(self, kind: object, *_: object) -> None:
        """Restore the states."""
        seeds = self._seeds
        after, seeds.last_reading = seeds.last_reading if kind is None else None, None
        self._isolation.restore(after)


def _read(dataset: Any, indices: list[Any]) -> list[Any]:
    many = getattr(dataset, "__getitems__", None)
    return list(many(indices)) if many else [dataset[index] for index in indices]
