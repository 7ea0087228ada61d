"""Map-style loaders that can start at any batch of an epoch, and give the same batches as without an interruption."""

import copy
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from midstride.engine.data.limits import limited
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.order import BatchOrder, BatchRequest, InOrder, StridedOrder
from midstride.engine.data.read_side_effects import ReadSideEffects
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.data.rng.per_sample import IsolatedReads, Rng, SampleSeeder
from midstride.engine.data.sampler_order import BatchSamplerOrder, SamplerOrder
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


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _batching_of(loader: DataLoader[Any]) -> str:
    batches: Any = loader.batch_sampler
    return f"batch_size={batches.batch_size}, drop_last={batches.drop_last}" if type(batches) is BatchSampler else ""


class _BatchSampler:
    """The batch sampler: yields requests, from a position that is set before each pass."""

    def __init__(self, order: BatchOrder, key: int, *, probe: bool) -> None:
        self.order, self.key, self._probe = order, key, PROBED if probe else 0
        self.epoch = self.start = self.count = 0
        #: number of idle requests, so that each batch is read by the same worker as without a resume
        self.idle = 0
        #: indices of batches that are requested and not yet returned
        self.pending: deque[list[Any]] = deque()

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[BatchRequest | Idle]:
        self.pending.clear()
        yield from [Idle()] * self.idle
        # No more than will be used, so that workers do not read batches beyond a limit.
        for fetch in islice(self.order.requests(mix(self.key, self.epoch), self.start), self.count):
            self.pending.append(fetch.indices)
            probe = min(self._probe, len(fetch.indices))
            self._probe -= probe
            yield fetch._replace(probe=probe) if probe else fetch


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
        self._sampler = _BatchSampler(order, key, probe=rng == "lazy")
        self._in_main = loader.num_workers == 0
        self._has_numbers = isinstance(order.sequence, InOrder)  # else a sampler may give any object as an index
        self._rng_isolation = RngIsolation()
        self._data = WorkerData(loader, copies=not self._in_main)
        self._has_read = False
        #: length of the data set when its order was made, if it has one
        self._samples, self._has_warned_of_length = _length(loader.dataset), False
        self._batching, self._has_warned_of_batching = _batching_of(loader), False
        self._module: nn.Module | None = None  #: the module in training
        #: text that says that workers read the module in training; None if they do not
        self._module_warning: str | None = None
        self._loader = self._build_dataloader(loader, key)
        self.max_batches = len(self)
        self.batch_size = order.batch_size

    def __len__(self) -> int:
        """Return the number of batches in an epoch on this rank, after the limit."""
        return limited(len(self.order), self._limit)

    @property
    def unlimited_batches(self) -> int:
        """Number of batches in an epoch on this rank, before the limit."""
        return len(self.order)

    def order_identity(self) -> dict[str, Any]:
        """Return global batch size, number of samples, `drop_last`, and the identity of the order."""
        return {
            "global_batch_size": self.order.global_batch_size,
            "samples": len(self.order.sequence),
            "drop_last": getattr(self.order, "drop_last", False),
            **self.order.sequence.identity,
        }

    @property
    def fixed_world(self) -> str | None:  # type: ignore[override]
        """Why order or random numbers would change with another number of ranks; None if they would not."""
        if isinstance(self.order, BatchSamplerOrder):
            return f"the batches of its {type(self.source.batch_sampler).__name__} are dealt to the ranks whole"
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
            raise TypeError("batches that the user's own code makes have no size to set")
        self.order = self._sampler.order = replace(self.order, batch_size=batch_size)
        self.batch_size = batch_size
        self.max_batches = limited(len(replace(self.order, rank=0)), self._limit)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of `epoch` from batch `start` on."""
        count = len(self) - start
        if count <= 0:
            return
        iterator = self._start_pass(epoch, start, count, before=start)
        last = start + count - 1
        for number in range(start, last + 1):
            batch, self.last_indices = self._next(iterator, number)
            self.at_end = number == last
            if self.at_end:
                self._data.end_pass()
            yield batch

    def _start_pass(self, epoch: int, start: int, count: int, *, before: int) -> Iterator[Any]:
        """Return an iterator over `count` requests of `epoch`, from batch `start` on; `before` precede them."""
        self._warn_of_length()
        self._warn_of_batching()
        self.order.sequence.open(epoch, resumed=start > 0)
        self._sampler.epoch, self._sampler.start, self._sampler.count = epoch, start, count
        self._sampler.idle = before % self._loader.num_workers if self._loader.num_workers else 0
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
        """Return the monitor of side effects; it gets the module only if it is read here, or the data refer to it."""
        data, module = (self.source.dataset, self.source.collate_fn), self._module
        is_held = self._in_main or module is None or any(path_to_module(one, module) is not None for one in data)
        return ReadSideEffects(*data, module if is_held else None)

    def _warn_of_length(self) -> None:
        """Warn once if the length of the data set has changed, which the order ignores."""
        if not self._has_numbers or self._has_warned_of_length:
            return
        if (now := _length(self.source.dataset)) != self._samples:
            self._has_warned_of_length = True
            log.warning(
                "the %s data set has %s samples now, and had %s at first: the order of samples stays one of %s. Begin "
                "with all of them, and let a sampler of your own choose",
                self._what,
                now,
                self._samples,
                self._samples,
            )

    def _warn_of_batching(self) -> None:
        """Warn once if the user has changed the batch size, which is ignored."""
        if not self._has_warned_of_batching and (now := _batching_of(self.source)) != self._batching:
            self._has_warned_of_batching = True
            words = "the batch sampler of the %s loader has %s now, and had %s at first: batches stay as they were. "
            words += "A batch sampler of your own may give batches of any size, as many in each epoch"
            log.warning(words, self._what, now, self._batching)

    def attach(self, module: nn.Module) -> None:
        """Exclude `module`, which is being trained, from the data that workers get at the start of a pass."""
        self._data, self._module = WorkerData(self.source, module, copies=not self._in_main), module
        path = None if self._in_main or self._what != "train" else path_to_module(self.source.dataset, module)
        if path is not None:
            self._module_warning = (
                f"the workers of the train loader read the module as it was when they were started ({path})"
            )

    def changed_in_pass(self) -> str | None:
        """Return text that says that workers read the module in training; None if they do not."""
        return self._module_warning

    def _read_in_process(self, side_effects: ReadSideEffects) -> Iterator[Any]:
        """Yield what the DataLoader would without workers, in two thirds of its time."""
        dataset: Any = self._loader.dataset
        collate = self._loader.collate_fn
        for request in self._sampler:
            assert not isinstance(request, Idle)
            if request.probe or not self._has_read:
                self._has_read = True
                yield self._read_once(request, side_effects)
            else:
                yield collate(dataset.__getitems__(request))

    def _read_once(self, request: BatchRequest, side_effects: ReadSideEffects) -> Any:
        """Return a batch that may be read several times, with the side effects of one reading.

        Side effects on data in this process are state, which repeated readings must not change.
        """
        dataset: Any = self._loader.dataset
        collate = self._loader.collate_fn
        before = copy.deepcopy(side_effects.nodes())
        batch = collate(dataset.__getitems__(request))
        if isinstance(batch, WorkerFailure) or side_effects.changed_since(before) is None:
            return batch
        side_effects.restore(before)
        return collate(dataset.__getitems__(request._replace(probe=0)))

    def _next(self, iterator: Iterator[Any], number: int) -> tuple[Any, list[int] | None]:
        """Return the next batch, part of batch `number` of the epoch, and the indices of its samples."""
        if self._in_main:
            with self._isolated:
                batch = next_batch(iterator, self._where, number)
        else:
            while isinstance(batch := next_batch(iterator, self._where, number), Idle):
                pass
        indices = self._sampler.pending.popleft()
        return batch, indices if self._has_numbers or {*map(type, indices)} == {int} else None

    def planned_indices(self) -> Iterator[list[Any]] | None:
        """Return the items of each batch that a sampler gives this rank in the current epoch."""
        sequence = self.order.sequence
        is_own = "sampler" in sequence.identity or getattr(self.order, "own", False)
        if not is_own or len(sequence) > COUNTED:
            return None
        return (fetch.indices for fetch in islice(self.order.requests(0, 0), len(self)))

    def shared_order(self) -> str | None:
        """Return a digest of the sampler's order of the current epoch, if all ranks share it."""
        order = self.order
        if (
            not isinstance(order.sequence, SamplerOrder)
            or getattr(order, "own", False)
            or getattr(order, "size", 1) == 1
        ):
            return None
        return order.sequence.digest()

    def _where(self, number: int) -> str:
        rank = getattr(self.order, "rank", 0)
        return (
            f"\nin batch {number} of epoch {self._sampler.epoch} of the {self._what} loader on rank {rank}, "
            f"samples {format_indices(self._sampler.pending[0])}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler, whether collate_fn draws, and the data that workers began with."""
        collate: Any = self._loader.collate_fn
        return {
            "sampler": self.order.sequence.state_dict(),
            "random_collate": self._seeds.collate_drew,
            **self._data.state_dict(collate.collate),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state."""
        self.order.sequence.load_state_dict(state_dict["sampler"])
        self._seeds.set_collate_drew(state_dict["random_collate"])
        self._data.load_state_dict(state_dict)

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
        clone._seeds, clone._data = copy.copy(self._seeds), copy.copy(self._data)
        return clone

    def _build_dataloader(self, loader: DataLoader[Any], key: int) -> DataLoader[Any]:
        batches: Any = self._sampler
        collate: Any = SeededCollate(loader.collate_fn, self._seeds, single=loader.batch_sampler is None)
        dataset, init = SeededDataset(loader.dataset, self._seeds), loader.worker_init_fn
        return rebuild_loader(loader, dataset, key=key, init=init, batch_sampler=batches, collate_fn=collate)
