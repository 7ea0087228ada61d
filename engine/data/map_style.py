"""Map-style loaders that start at any batch, with the samples of an undisturbed run."""

import copy
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from midstride.engine.data.bad_samples import BadSample, NoSampleLeft, PartialBatch, no_sample_left
from midstride.engine.data.batch_sampler_order import BatchSamplerOrder
from midstride.engine.data.data_check import SAMPLES, DataCheck, DataDigests, SampleCheck
from midstride.engine.data.limits import limited, stream_limits
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.order import ENDLESS, BatchOrder, BatchRequest, InOrder, StridedOrder
from midstride.engine.data.read_side_effects import ReadSideEffects
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.data.rng.per_sample import IsolatedReads, Rng, SampleSeeder
from midstride.engine.data.sampler_order import SamplerOrder
from midstride.engine.data.seeded_dataset import Idle, SeededCollate, SeededDataset, WorkerFailure, format_indices
from midstride.engine.data.worker_data import WorkerData
from midstride.engine.data.workers import end_all_workers, next_batch, rebuild_loader, start_workers
from midstride.engine.objects.generator_search import path_to_module
from midstride.engine.seeds import mix

__all__ = ["COUNTED", "MapLoader"]

log = logging.getLogger(__name__)

#: number of samples that are read twice in each attempt: a data set may draw from an unknown source for some only
PROBED = 64
#: largest number of samples whose indices are recorded at the start of an epoch; for more it would take seconds
COUNTED = 10_000_000


def _batching_of(loader: DataLoader[Any]) -> str:
    batches: Any = loader.batch_sampler
    return f"batch_size={batches.batch_size}, drop_last={batches.drop_last}" if type(batches) is BatchSampler else ""


class _BatchSampler:
    """The batch sampler: yields requests, from a position that is set before each pass."""

    def __init__(self, order: BatchOrder, key: int, *, probe: bool, workers: int) -> None:
        self.order, self.key, self._probe = order, key, PROBED if probe else 0
        self._workers = workers
        self.epoch = self._idle = 0
        #: request for samples to compare, after the first batch of the next pass; None if there is none
        self.check: SampleCheck | None = None
        #: indices of batches that are requested and not yet returned
        self.pending: deque[list[Any]] = deque()
        self._requests: Iterator[BatchRequest] = iter(())
        self._ahead: BatchRequest | None = None

    def begin(self, epoch: int, start: int, end: int, *, idle: int) -> None:
        """Set the next pass over batches `start` to `end` of `epoch`, or to its end.

        Args:
            epoch: the epoch, whose order is open.
            start: number of the first batch.
            end: number of the batch after the last one; workers read none beyond a limit.
            idle: number of idle requests, so that each batch is read by the same worker as without a resume.
        """
        self.epoch, self._idle = epoch, idle
        self.pending.clear()
        self._requests, self._ahead = self.order.requests(mix(self.key, epoch), start, end), None

    def has_more(self) -> bool:
        """Return whether a batch of the pass was not returned yet.

        Called before each batch: then a sampler that is drawn in blocks draws here, and not while a batch is read.
        """
        if not self.pending and self._ahead is None:
            self._ahead = next(self._requests, None)
        return bool(self.pending) or self._ahead is not None

    def __iter__(self) -> Iterator[BatchRequest | SampleCheck | Idle]:
        yield from [Idle()] * self._idle
        while (request := self._ahead or next(self._requests, None)) is not None:
            self._ahead = None
            self.pending.append(request.indices)
            probe = min(self._probe, len(request.indices))
            self._probe -= probe
            yield request._replace(probe=probe) if probe else request
            if self.check is not None:  # after the first batch, which finds the generators that the data use
                check, self.check = self.check, None
                yield check
                yield from [Idle()] * (self._workers - 1)


class MapLoader(ResumableLoader):
    """A map-style DataLoader that can start at any batch of any epoch.

    Args:
        loader: the user's loader; its data set, workers, collate_fn and other settings are used.
        order: the samples of this rank.
        key: hash that makes random numbers of this loader differ from those of others.
        limit: share of the batches, or number of batches.
        rng: whether each sample or each batch is seeded.
        what: name of the loader in messages.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        order: BatchOrder,
        key: int,
        limit: float = 1.0,
        *,
        rng: Rng = "lazy",
        what: str = "train",
    ) -> None:
        self.order, self.source = order, loader
        self._limit, self._rng, self._what = limit, rng, what
        self._seeds = SampleSeeder(rng, shared=loader.num_workers > 0)
        self._sampler = _BatchSampler(order, key, probe=rng == "lazy", workers=loader.num_workers)
        self._bad_samples: list[BadSample] = []
        self._check: DataCheck | None = None  #: compares samples with those of other ranks and attempts
        self._in_main = loader.num_workers == 0
        self._has_numbers = isinstance(order.sequence, InOrder)  # else a sampler may give any object as an index
        self._rng_isolation = RngIsolation()
        self._data = WorkerData(loader, copies=not self._in_main)
        self._has_read = False
        self._samples = len(order.sequence) if order.sequence.is_sized else None
        self._batching, self._has_warned_of_batching = _batching_of(loader), False
        self._module: nn.Module | None = None  #: the module in training
        #: text that says that workers read the module in training; None if they do not
        self._module_warning: str | None = None
        self._loader = self._build_dataloader(loader, key)
        self.is_sized, self.endless = order.sequence.is_sized, order.sequence.endless
        self.batch_size = order.batch_size
        if not self.is_sized:
            stream_limits(f"the {what} loader", None, limit)

    def __len__(self) -> int:
        """Return the number of batches of this rank in the epoch opened last, after the limit."""
        return limited(len(self.order), self._limit)

    @property
    def estimated_batches(self) -> int | None:
        """Number of batches in the last opened epoch; for an endless sampler the limit, or None."""
        if self.is_sized:
            return len(self)
        return self._limit if isinstance(self._limit, int) else None

    @property
    def unlimited_batches(self) -> int | None:
        """This rank's batches in the last opened epoch, before the limit; None if unknown."""
        return len(self.order) if self.is_sized else None

    def order_identity(self) -> dict[str, Any]:
        """Return global batch size, number of samples, `drop_last`, and the identity of the order."""
        return {
            "global_batch_size": self.order.global_batch_size,
            "samples": self._samples,
            "drop_last": getattr(self.order, "drop_last", False),
            **self.order.sequence.identity,
        }

    @property
    def fixed_world(self) -> str | None:  # type: ignore[override]
        """Reason why order or random numbers need this number of ranks; None without one."""
        if isinstance(self.order, BatchSamplerOrder):
            return f"the batches of its {type(self.source.batch_sampler).__name__} go to the ranks as a whole"
        if getattr(self.order, "own", False):
            return "every rank reads samples of its own, by use_distributed_sampler=False or a sampler of its own"
        if self._rng == "batch":
            return "rng='batch' seeds the random numbers of a rank's batch as a whole"
        if self._seeds.collate_drew:
            return "its collate_fn draws random numbers, once for each rank's batch"
        return None

    def valid_world_sizes(self, size: int, batch_size: int) -> list[int]:
        """Return the divisors of the global batch size for which `drop_last` drops the same samples."""
        if self.fixed_world is not None or not isinstance(order := self.order, StridedOrder):
            return [size]

        def end(ranks: int) -> tuple[int, int]:
            cut = replace(order, rank=0, size=ranks, batch_size=size * batch_size // ranks)
            leaves_out = order.rest == "dropped" and not order.drop_last  # an incomplete last batch is kept
            return len(cut), cut.rank_samples() * ranks if leaves_out else 0

        whole = size * batch_size
        return [n for n in range(1, whole + 1) if whole % n == 0 and end(n) == end(size)]

    def resize(self, batch_size: int) -> None:
        """Set the batch size of this rank; positions are counted in batches of the new size."""
        if not isinstance(self.order, StridedOrder):
            raise TypeError("your own code makes the batches, so their size cannot be set")
        self.order = self._sampler.order = replace(self.order, batch_size=batch_size)
        self.batch_size = batch_size

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Open `epoch`; return an iterator over its batches from batch `start` on."""
        self._warn_of_batching()
        self.order.sequence.open(epoch, resumed=start > 0)
        return self._read(epoch, start, len(self) if self.is_sized else (self.estimated_batches or ENDLESS))

    def _read(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        if start >= end:
            return
        iterator, number = self._start_pass(epoch, start, end, before=start), start
        while self._sampler.has_more():
            batch, self.last_indices = self._next(iterator, number)
            number += 1
            self.at_end = not self._sampler.has_more()
            if self.at_end:
                self._end_pass()
            yield batch

    def _end_pass(self) -> None:
        """Handle that the last batch of the pass was read."""
        self._data.end_pass()
        self.order.sequence.close()

    def _start_pass(self, epoch: int, start: int, end: int, *, before: int) -> Iterator[Any]:
        """Return an iterator over batches `start` to `end` of `epoch`, after `before` requests."""
        workers = self._loader.num_workers
        self._sampler.begin(epoch, start, end, idle=before % workers if workers else 0)
        if self._check is not None:
            self._sampler.check = self._check.request(partial(self._opening, epoch), is_first=epoch == start == 0)
        with self._data.data_of_pass(resumed=start > 0):
            collate: Any = self._loader.collate_fn
            collate.set_collate(self.source.collate_fn)
            self._isolated = IsolatedReads(
                self._seeds, self._rng_isolation, self.source.dataset, self.source.collate_fn
            )
            side_effects = self._side_effects()
            self._seeds.watch_side_effects(None if self._in_main else side_effects)
            if self._in_main and not self._loader.pin_memory:
                return self._read_in_process(side_effects)
            init: Any = self._loader.worker_init_fn
            init.set_init(self.source.worker_init_fn)
            with self._rng_isolation:
                return start_workers(self._loader, f"the {self._what} loader")

    def _side_effects(self) -> ReadSideEffects:
        """Return the monitor of side effects, with the module only if reading can reach it."""
        data, module = (self.source.dataset, self.source.collate_fn), self._module
        is_held = self._in_main or module is None or any(path_to_module(one, module) is not None for one in data)
        return ReadSideEffects(*data, module if is_held else None)

    def _warn_of_batching(self) -> None:
        """Warn once if the user has changed the batch size, which is ignored."""
        if not self._has_warned_of_batching and (now := _batching_of(self.source)) != self._batching:
            self._has_warned_of_batching = True
            words = "the batch sampler of the %s loader has %s now, and had %s at first: batches stay as they were. "
            words += "A batch sampler of your own may give batches of any size, as many in each epoch"
            log.warning(words, self._what, now, self._batching)

    def _opening(self, epoch: int) -> BatchRequest | None:
        """Return a request for some samples at both ends of the epoch, the same on all ranks."""
        if not self.is_sized or not len(self.order):
            return None
        order: Any = self.order
        order, key, end = replace(order, rank=0), mix(self._sampler.key, epoch), len(order)
        first: BatchRequest = next(order.requests(key, 0, 1))
        last: BatchRequest = next(order.requests(key, end - 1, end), first)
        return first._replace(indices=[*first.indices[: SAMPLES // 2], *last.indices[-(SAMPLES // 2) :]])

    def take_bad_samples(self) -> list[BadSample]:
        """Return the samples that could not be read since the last call."""
        found, self._bad_samples = self._bad_samples, []
        return found

    def skip_bad_samples(self) -> None:
        """Leave out samples whose reading raises an error; `take_bad_samples` returns them."""
        dataset: Any = self._loader.dataset
        dataset.skip_bad_samples()

    def leave_out(self, indices: Sequence[int]) -> None:
        """Leave samples out of their batches; `take_bad_samples` returns them."""
        dataset: Any = self._loader.dataset
        dataset.leave_out(indices)

    def check_data(self) -> None:
        """Compare some samples with those of other ranks, and of earlier attempts."""
        order = self.order
        # Reading without workers has side effects, which only `_read_in_process` reverts. States are those of rank 0.
        is_reverted = self._rng == "lazy" and not (self._in_main and self._loader.pin_memory)
        if is_reverted and not getattr(order, "own", False):
            self._check = DataCheck(self.source.dataset, f"the {self._what} loader")

    def data_digests(self) -> list[DataDigests]:
        """Return the digests of the samples that were read to be compared, once in an attempt."""
        return [] if self._check is None else self._check.take()

    def accept_data(self) -> None:
        """Compare no more with the samples of earlier attempts."""
        if self._check is not None:
            self._check.accept()

    def attach(self, module: nn.Module) -> None:
        """Exclude the trained `module` from the data that workers get at the start of a pass."""
        self._data, self._module = WorkerData(self.source, module, copies=not self._in_main), module
        path = None if self._in_main or self._what != "train" else path_to_module(self.source.dataset, module)
        if path is not None:
            self._module_warning = (
                f"the workers of the train loader read the module as it was when they were started ({path})"
            )

    def changed_in_pass(self) -> str | None:
        """Return text if workers read the module, or training has changed an endless sampler."""
        sequence = self.order.sequence
        if self.is_sized or not isinstance(sequence, SamplerOrder):
            return self._module_warning
        return self._module_warning or sequence.changed_in_pass()

    def _read_in_process(self, side_effects: ReadSideEffects) -> Iterator[Any]:
        """Yield the batches of a DataLoader without workers, in two thirds of its time."""
        dataset: Any = self._loader.dataset
        collate = self._loader.collate_fn
        for request in self._sampler:
            assert not isinstance(request, Idle)
            if isinstance(request, SampleCheck):
                yield self._read_once(request, side_effects)
            elif request.probe or not self._has_read:
                self._has_read = True
                yield self._read_once(request, side_effects)
            else:
                yield collate(dataset.__getitems__(request))

    def _read_once(self, request: BatchRequest | SampleCheck, side_effects: ReadSideEffects) -> Any:
        """Return a batch that may be read several times, with the side effects of one reading.

        Side effects on data in this process are state, which repeated readings must not change.
        """
        dataset: Any = self._loader.dataset
        collate = self._loader.collate_fn
        before = copy.deepcopy(side_effects.nodes())
        batch = collate(dataset.__getitems__(request))
        if isinstance(batch, (WorkerFailure, PartialBatch)) or side_effects.changed_since(before) is None:
            return batch
        side_effects.restore(before)
        if isinstance(request, SampleCheck):
            return batch
        return collate(dataset.__getitems__(request._replace(probe=0)))

    def _next(self, iterator: Iterator[Any], number: int) -> tuple[Any, list[int] | None]:
        """Return the next batch, part of batch `number`, and the indices of its samples."""
        batch = self._next_answer(iterator, number)
        if self._check is not None and self._check.is_asked:
            self._check.answered(self._next_answer(iterator, number))
        bad: tuple[BadSample, ...] = ()
        if isinstance(batch, PartialBatch):
            self._bad_samples += (bad := batch.bad)
            if batch.batch is None:
                raise NoSampleLeft(f"{no_sample_left(bad)}{self._where(number)}")
            batch = batch.batch
        indices = self._sampler.pending.popleft()
        self.last_samples = len(indices)
        self.weight = self._weight_of(indices, bad)
        return batch, indices if self._has_numbers or {*map(type, indices)} == {int} else None

    def _weight_of(self, indices: list[Any], bad: Sequence[BadSample]) -> int | None:
        """Return the number of samples in a batch; None if one item may stand for several."""
        if self.source.batch_sampler is not None:
            return len(indices) - len(bad)
        is_batch = isinstance(self.source.sampler, BatchSampler) and isinstance(indices[0], list)
        return len(indices[0]) if is_batch else None

    def _next_answer(self, iterator: Iterator[Any], number: int) -> Any:
        if self._in_main:
            with self._isolated:
                return next_batch(iterator, self._where, number)
        while isinstance(answer := next_batch(iterator, self._where, number), Idle):
            pass
        return answer

    def planned_indices(self) -> Iterator[list[Any]] | None:
        """Return the items of each batch that a sampler gives this rank in the current epoch."""
        sequence = self.order.sequence
        has_changed = isinstance(sequence, InOrder) and sequence.has_changed
        is_own = has_changed or "sampler" in sequence.identity or getattr(self.order, "own", False)
        if not is_own or not self.is_sized or len(sequence) > COUNTED:
            return None
        return (fetch.indices for fetch in self.order.requests(0, 0, len(self)))

    def shared_order(self) -> str | None:
        """Return a digest of the sampler's order or length in this epoch, if all ranks share it."""
        order, sequence = self.order, self.order.sequence
        if getattr(order, "own", False) or getattr(order, "size", 1) == 1:
            return None
        return sequence.digest() if isinstance(sequence, SamplerOrder) else f"{len(sequence)} samples"

    def _where(self, number: int) -> str:
        rank = getattr(self.order, "rank", 0)
        samples = self._sampler.pending[0] if self._sampler.pending else []  # none while samples are compared
        return (
            f"\nin batch {number} of epoch {self._sampler.epoch} of the {self._what} loader on rank {rank}, "
            f"samples {format_indices(samples)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, whether collate_fn draws, and the data of the workers."""
        collate: Any = self._loader.collate_fn
        return {
            "sampler": self.order.sequence.state_dict(),
            "random_collate": self._seeds.collate_drew,
            **self._data.state_dict(collate.collate),
            **({} if self._check is None else self._check.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state."""
        self.order.sequence.load_state_dict(state_dict["sampler"])
        self._seeds.set_collate_drew(state_dict["random_collate"])
        self._data.load_state_dict(state_dict)
        if self._check is not None:
            self._check.load_state_dict(state_dict)

    def restored(self) -> None:
        """Record the data that persistent workers began with."""
        self._data.restored()

    def close(self) -> None:
        """End all workers."""
        end_all_workers(self._loader)

    def clone(self) -> "MapLoader":
        """Return a loader that can load a state while this one is read."""
        clone = copy.copy(self)
        clone.order = self.order.clone()
        clone._seeds, clone._data, clone._check = copy.copy(self._seeds), copy.copy(self._data), copy.copy(self._check)
        return clone

    def _build_dataloader(self, loader: DataLoader[Any], key: int) -> DataLoader[Any]:
        batches: Any = self._sampler
        collate: Any = SeededCollate(loader.collate_fn, self._seeds, single=loader.batch_sampler is None)
        dataset, init = SeededDataset(loader.dataset, self._seeds), loader.worker_init_fn
        return rebuild_loader(loader, dataset, key=key, init=init, batch_sampler=batches, collate_fn=collate)
