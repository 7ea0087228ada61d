"""Loader of an iterable data set; its position: batches read of each shard, and states."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterDataPipe

from midstride.engine.data.data_check import DataDigests
from midstride.engine.data.iterable.schedule import PassPosition, ShardBatch, ShardRequestSampler, shard_rotation
from midstride.engine.data.iterable.shard_state import ShardExhausted, ShardState, add_marks
from midstride.engine.data.iterable.shards import ShardReader
from midstride.engine.data.limits import stream_limits
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.read_side_effects import ReadSideEffects
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.data.worker_data import WorkerData
from midstride.engine.data.workers import end_all_workers, next_batch, rebuild_loader, start_workers
from midstride.engine.errors import NotExact, UserError
from midstride.engine.objects.digest import users_lines
from midstride.engine.objects.generator_search import path_to_module, restorable, shared_generators, shared_with_module
from midstride.engine.seeds import mix

__all__ = ["IterableLoader"]

log = logging.getLogger(__name__)


class IterableLoader(ResumableLoader):
    """A DataLoader over an iterable data set, which can resume within an epoch.

    It reads one batch of each shard in turn, skipping shards that have ended. That is the order of plain PyTorch, but
    here it does not depend on the number of workers.

    Args:
        loader: the user's loader.
        name: name of the loader in messages.
        key: hash that makes random numbers of this loader and rank differ from those of others.
        limit: share of the batches, or number of batches.
        check_repeatability: whether to read some batches more than once, to check repeatability and states.
        agree: returns whether its argument is true on every rank; all ranks call it at each batch, so that they end an
            epoch with the same batch. Without it, each rank reads its data to their end.

    Raises:
        NotExact: the data set is a data pipe.
        UserError: the limit is a share of an unknown number of batches.
    """

    is_sized = False
    fixed_world = "an iterable data set decides what each rank reads"
    source: Any
    _compares_ranks: bool = False  #: whether the first batch is to be compared with those of other ranks
    #: path -> object that data set and module share, so that training may change it
    _shared: Mapping[str, object] = MappingProxyType({})

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        name: str,
        key: int,
        limit: float,
        check_repeatability: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        dataset: Any = loader.dataset
        self.name = self._full_name(name, dataset)
        if isinstance(dataset, IterDataPipe):
            raise NotExact(
                f"{self.name}: data pipes are not supported. Write an IterableDataset that iterates over it."
            )
        self.source, self._source, self.batch_size = loader, loader, loader.batch_size
        self._drop_last, self._agree = loader.drop_last, agree
        #: number of shards, the same in all attempts of a run; 0 if `get_worker_info()` returns None to the data set
        self.shards = int(getattr(dataset, "virtual_shards", loader.num_workers))
        self._unlimited_batches = _length(loader)
        self._expected, self._limit = stream_limits(self.name, self._unlimited_batches, limit)
        self._workers, self._persistent = loader.num_workers, loader.persistent_workers
        self._rng_isolation = RngIsolation()
        self._reader = ShardReader(loader, key=key, where=self.name, check_repeatability=check_repeatability)
        self._data = WorkerData(loader, copies=True)
        #: text that says that the data set uses the module in training; None if it does not
        self._module_warning: str | None = None
        self._requests = ShardRequestSampler()
        self._loader = _build_dataloader(loader, self._reader, self._requests, key)
        self._position = PassPosition.start(max(1, self.shards))
        self._passes, self._has_warned = 0, False
        #: digests, at the start of the pass, of data that `_data` does not restore
        self._initial_digests: dict[str, str] = {}
        self._collate_side_effects: ReadSideEffects | None = None  #: finds changes of the collate_fn, without workers

    @staticmethod
    def _full_name(name: str, dataset: Any) -> str:
        """Return the name of the loader in messages."""
        return f"{name} over {type(dataset).__name__}"

    def attach(self, module: nn.Module) -> None:
        """Read the data set itself, not copies, if it refers to the trained `module`."""
        path = path_to_module(self._reader.dataset, module)
        is_live = path is not None and not self.shards
        self._data = WorkerData(self._source, module, copies=not is_live)
        if is_live:
            self._module_warning = f"{self.name} acts on the module in training ({path})"
            self._reader.read_live()
        elif path is not None:
            self._module_warning = f"{self.name} reads the module as it was when the epoch began ({path})"
        if not self.shards:
            self._shared = shared_with_module(self._reader.dataset, module)
            self._reader.share(self._shared.values())

    def __len__(self) -> int:
        raise TypeError(f"the number of batches of {self.name} is unknown until they are read")

    @property
    def estimated_batches(self) -> int | None:
        """Number of batches in an epoch by the data set, possibly wrong; None if unknown."""
        return self._expected

    @property
    def unlimited_batches(self) -> int | None:
        """Number of batches in an epoch before the limit according to the data set; None if unknown."""
        return self._unlimited_batches

    def order_identity(self) -> dict[str, Any]:
        """Return batch size and `drop_last`; the order of samples itself is up to the data set."""
        return {"iterable": True, "batch_size": self.batch_size, "drop_last": self._drop_last}

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of `epoch` from batch `start` on.

        With `start` > 0, resume from the loaded state.
        """
        position = self._position = self._position if start else PassPosition.start(max(1, self.shards))
        number, most = start, self._limit
        if most is not None and number >= most:
            return
        reading = self._read(epoch, position, resumed=start > 0)
        ahead = next(reading, None)
        self._check_first(number, ahead)
        while ahead is not None:
            current, number = ahead, number + 1
            ahead = next(reading, None) if most is None or number < most else None
            self.at_end = not self._all_agree(ahead is not None)
            if self.at_end and ahead is not None:
                self._warn_of_rest()
            if self.at_end:
                self._data.end_pass()
            position.consume(current)
            self.last_mark, self.last_samples = current.answer.mark, current.answer.samples
            self.weight = current.answer.samples
            yield current.answer.batch
            if self.at_end:
                return

    def compare_ranks(self) -> None:
        """Compare the first batch with those of other ranks, which may all read the same samples."""
        self._compares_ranks = True

    def data_digests(self) -> Sequence[DataDigests]:
        """Return a digest of the samples that were read up to the first batch, once."""
        if not self._compares_ranks or not any(self._position.read):
            return ()
        self._compares_ranks = False
        return [DataDigests.of_rank(self.name, self._reader.key, reduce(mix, self._position.digests, 0))]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last returned batch, with states and digests by shard."""
        position = self._position
        states = {
            shard: {
                "batch": saved.batch,
                "due": saved.next_at,
                "state": pickle.loads(saved.data),
                "digest": saved.digest,
                "total": saved.total,
            }
            for shard, saved in sorted(position.resume_states().items())
        }
        return {
            "shards": self.shards,
            "read": list(position.read),
            "ended": list(position.ended),
            "turn": position.turn,
            "states": states,
            "digests": list(position.digests),
            "totals": list(position.totals),
            "had_states": position.had_states,
            **self._data.state_dict(self._reader.collation.function),
        }

    def read_digest(self) -> int:
        """Return the sum of the marks of all batches in the pass."""
        return reduce(add_marks, self._position.totals, 0)

    @property
    def had_states(self) -> bool:  # type: ignore[override]
        """Whether a resume of this pass would load a state of the data set."""
        return self._position.had_states

    def changed_in_pass(self) -> str | None:
        """Return text on data changed since the pass began, which a resume would read; or None."""
        if (changed := self._changed_in_collate()) is None:
            if self._position.had_states:
                return None
            if self._module_warning is not None:
                return self._module_warning
            now, before = self._content(), self._initial_digests
            changed = next((name for name in now | before if now.get(name) != before.get(name)), None)
        if changed is None:
            return None
        return f"{self.name}: {changed} has changed since the epoch began, which reads the data as they were then"

    def _changed_in_collate(self) -> str | None:
        what = None if self._collate_side_effects is None else self._collate_side_effects.changed()
        return None if what is None else what.partition(" (")[0].replace("/", ".")

    def _content(self) -> dict[str, str]:
        """Return digests of data not restored by `_data`: of all, if the data set itself is read."""
        if self._reader.is_shared:
            return users_lines(type(self._reader.dataset).__name__, self._reader.dataset)
        lines: dict[str, str] = {}
        for path, value in {**self._data.unrestored(), **self._shared}.items():
            lines |= users_lines(path.replace("/", "."), value)
        return lines

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the position, and the number of shards."""
        self.shards = state_dict["shards"]
        states = {  # the numbers of shards are strings in JSON
            int(shard): ShardState(
                saved["batch"],
                saved["due"],
                pickle.dumps(saved["state"]),
                saved["digest"],
                saved["total"],
            )
            for shard, saved in state_dict["states"].items()
        }
        read, ended = list(state_dict["read"]), list(state_dict["ended"])
        self._position = PassPosition(
            read,
            ended,
            state_dict["turn"],
            digests=list(state_dict["digests"]),
            earlier_states=states,
            totals=list(state_dict["totals"]),
            had_states=state_dict["had_states"],
        )
        self._data.load_state_dict(state_dict)

    def restored(self) -> None:
        """Record the data that persistent workers began with."""
        self._data.restored()

    def close(self) -> None:
        """End all workers."""
        end_all_workers(self._loader)

    def clone(self) -> "IterableLoader":
        """Return a loader that can load a state while this one is read."""
        clone = copy.copy(self)
        clone._data = copy.copy(self._data)
        return clone

    def _read(self, epoch: int, position: PassPosition, *, resumed: bool) -> Iterator[ShardBatch]:
        """Yield the batches after `position`; `resumed` if the pass is resumed. Workers read ahead."""
        self._passes += 1
        self._log_replay(position.batches_to_replay())
        ended, newly_ended = list(position.ended), []
        if all(ended):
            return
        turns = shard_rotation(position, self._workers)
        with self._data.data_of_pass(resumed=resumed):
            iterator = self._start_pass(epoch, position)
            if self._reader.is_shared:
                self._data.stop_copying()
            self._record_start()
        while not all(ended):
            if self._workers:
                answer = next_batch(iterator, self._where, epoch)
            else:
                with self._rng_isolation:
                    answer = next_batch(iterator, self._where, epoch)
            shard = next(turns)
            if shard is None or ended[shard]:
                continue
            if isinstance(answer, ShardExhausted):
                ended[shard] = True
                newly_ended.append(shard)
                continue
            yield ShardBatch(answer, shard, tuple(newly_ended))
            newly_ended.clear()

    def _record_start(self) -> None:
        if self._passes == 1 or not self._persistent:
            self._initial_digests = self._content()
        self._collate_side_effects = None if self._workers else self._data.collate_side_effects()

    def _start_pass(self, epoch: int, position: PassPosition) -> Iterator[Any]:
        """Return an iterator over the answers of a pass, from copies of the data made now."""
        reader, requests, workers = self._reader, self._requests, self._workers
        own_process = workers and not self._persistent and len(position.read) <= workers
        reader.set_functions(self._source.collate_fn, self._source.worker_init_fn)
        reader.begin_pass(self.shards, copies=not own_process)
        requests.begin(self._passes, epoch, position, shard_rotation(position, workers))
        # Shards that are read in this process seed these generators, which must not affect training.
        used = [] if workers else [*restorable(shared_generators(reader.dataset)), *reader.collation.generators()]
        self._rng_isolation.include(used)
        with self._rng_isolation:
            # Other loaders are opened with the first batch: no training draws beside threads that they start.
            opens = not (workers or reader.is_whole)
            if opens and (failure := reader.open(requests.first_of_each(self._passes, epoch, position))):
                return iter([failure])
            if workers or self._loader.pin_memory:
                return start_workers(self._loader, self.name)
        return map(reader.__getitem__, requests)  # as MapLoader reads here

    def _where(self, epoch: int) -> str:
        return f"\nin epoch {epoch} of {self.name}, after {sum(self._position.read)} batches of this rank"

    def _all_agree(self, value: bool) -> bool:
        return value if self._agree is None else self._agree(value)

    def _check_first(self, number: int, first: ShardBatch | None) -> None:
        if self._agree is not None and not self._agree(first is not None):
            where = "on this rank" if first is None else "on another rank"
            if number == 0:
                raise UserError(f"{self.name} has no batch {where}: give each rank a part of the data.")
            raise UserError(
                f"{self.name} has no batch after batch {number}, which the run has trained on, {where}. Resume with "
                "the data it had, or start over under another run name."
            )

    def _warn_of_rest(self) -> None:
        if not self._has_warned:
            log.warning("%s has batches left when another rank's data end: the epoch ends there.", self.name)
        self._has_warned = True

    def _log_replay(self, behind: int) -> None:
        if behind:
            log.info(
                "reading %d batches of %s again to reach its position; with state_dict and load_state_dict it would "
                "continue there at once",
                behind,
                self.name,
            )


def _length(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches in an epoch; None if some data set has no length."""
    try:
        return len(loader) if hasattr(loader.dataset, "__len__") else None
    except (TypeError, NotImplementedError, AttributeError):  # as a wrapper raises of data without a length
        return None


def _build_dataloader(
    loader: DataLoader[Any], reader: ShardReader, requests: ShardRequestSampler, key: int
) -> DataLoader[Any]:
    return rebuild_loader(loader, reader, key=key, init=None, batch_size=None, sampler=requests, collate_fn=_identity)


def _identity(answer: Any) -> Any:
    return answer
