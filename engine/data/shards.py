"""Reading an iterable data set shard by shard, wherever that happens: in a worker or in the main process.

A shard is what plain PyTorch calls a worker: user code sees its number and how many there are in
`get_worker_info()`. How many workers really read them does not matter, because each shard has its own
iterator, and its own random numbers for every batch.
"""

import copy
import logging
import pickle
from collections.abc import Callable
from itertools import islice, repeat
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate, default_convert
from torch.utils.data._utils import worker as torch_worker

from midstride.engine.data.generators import seed_generators
from midstride.engine.data.seeded import Failure
from midstride.engine.data.sources import Source, source_of
from midstride.engine.errors import EngineError, NotExact, UserCodeError
from midstride.engine.seeds import mix

__all__ = ["Ask", "Ended", "Note", "ShardReader"]

log = logging.getLogger(__name__)
#: a state larger than this travels with every second batch only, one of three times this with every third, ...
STATE_BYTES = 16 * 1024
#: sets what opening a shard draws apart from what its batches draw
_OPENING = (1 << 64) - 1


class Note(NamedTuple):
    """A state that a shard can go on from.

    Args:
        batch: batches of the shard read before it was taken.
        due: the batch with which the next one will be taken.
        data: the state, pickled.
    """

    batch: int
    due: int
    data: bytes


class Ask(NamedTuple):
    """A batch that is wanted.

    Args:
        number: of the pass over the data, so that one broken off is not mistaken for the next.
        epoch: decides the random numbers.
        shard: of the data.
        batch: of the shard.
        note: with the first batch of a resumed pass, where to go on from.
    """

    number: int
    epoch: int
    shard: int
    batch: int
    note: Note | None


class Ended(NamedTuple):
    """The answer where a shard has no batch left."""


class ShardReader(Dataset[Any]):
    """A data set of answers: to an `Ask` it gives `(batch, note)`, `Ended` or a `Failure`; to None it gives None.

    Args:
        dataset: the user's, iterable.
        batch_size: samples of a batch; None takes samples as batches.
        drop_last: leave out a batch of a shard that is not full.
        collate: the user's.
        init: the user's `worker_init_fn`, called for each shard.
        key: hash that sets this reader's random numbers apart from every other's.
        where: names loader and rank in errors.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        collate: Callable[[Any], Any],
        init: Callable[[int], None] | None,
        key: int,
        where: str,
    ) -> None:
        self.dataset, self.collate, self.init, self.key, self.where = dataset, collate, init, key, where
        self.batch_size, self.drop_last = batch_size, drop_last
        #: what `get_worker_info()` shows as the number of workers; 0 where it shows that there are none
        self.shards = 0
        #: whether each shard of each pass reads a copy, or the process has the data set for itself
        self.copies = True
        # Torch's own draw nothing, and seeding costs as much as they do on small batches.
        self.collate_draws = collate is not default_collate and collate is not default_convert
        self._uncopied = False
        self._open: dict[int, _Shard] = {}

    def __getitem__(self, ask: Ask | None) -> Any:
        if ask is None:
            return None
        shard = self._open.get(ask.shard)
        outer = torch_worker._worker_info
        try:
            if shard is None or shard.number != ask.number:
                shard = self._open[ask.shard] = _Shard(self, ask)
            else:
                torch_worker._worker_info = shard.info
            return shard.read()
        except EngineError as error:
            # An exception would come out of a worker as torch words it.
            return Failure(type(error), str(error))
        finally:
            torch_worker._worker_info = outer

    def fresh(self) -> Any:
        """Return the data set as it was given: what one pass changes in it does not reach another."""
        if not self.copies or self._uncopied:
            return self.dataset
        try:
            return copy.deepcopy(self.dataset)
        except Exception as error:
            log.warning(
                "%s: %s cannot be copied (%s). What it changes in itself while it is read goes on from epoch to epoch, "
                "and is lost when the run resumes: open files and connections in __iter__, not in __init__.",
                self.where,
                type(self.dataset).__name__,
                error,
            )
            self._uncopied = True
            return self.dataset


class _Shard:
    """One shard in one pass."""

    def __init__(self, reader: ShardReader, ask: Ask) -> None:
        self.reader, self.number, self.shard = reader, ask.number, ask.shard
        self.key = mix(mix(reader.key, ask.epoch), ask.shard)
        self.position, self.due = (ask.note.batch, ask.note.due) if ask.note else (0, 1)
        self.over = False
        dataset = reader.fresh()
        seed = mix(self.key, _OPENING)
        self.info: Any = None
        if reader.shards:
            self.info = torch_worker.WorkerInfo(
                id=ask.shard, num_workers=reader.shards, seed=seed >> 1, dataset=dataset
            )
        torch_worker._worker_info = self.info
        seed_generators(seed)
        if reader.init is not None and reader.shards:
            self._calling("worker_init_fn", reader.init, ask.shard)
        state = pickle.loads(ask.note.data) if ask.note else None
        self.source: Source = self._calling("__iter__", source_of, dataset, ask.epoch, seed, state)
        # Not iter(), which islice would call each time: a data set that is its own iterator would start over.
        self.stream = map(next, repeat(self.source.iterator))
        self._return_to(ask.batch)

    def read(self) -> Any:
        """Return the next batch, and a note if one is due."""
        samples = self._calling("__next__", self._samples)
        if samples is None:
            return Ended()
        reader = self.reader
        if reader.collate_draws:
            seed_generators(mix(self.key, 2 * self.position + 1))
        batch = self._calling("collate_fn", reader.collate, samples)
        self.position += 1
        return batch, self._note()

    def _samples(self) -> Any:
        """Return the samples of the next batch; None if there are none."""
        if self.over:
            return None
        seed_generators(mix(self.key, 2 * self.position))
        wanted = self.reader.batch_size or 1
        samples = list(islice(self.stream, wanted))
        self.over = len(samples) < wanted
        if not samples or (self.over and self.reader.drop_last):
            return None
        return samples if self.reader.batch_size is not None else samples[0]

    def _note(self) -> Note | None:
        if self.position < self.due:
            return None
        state = self.source.state(self.position * (self.reader.batch_size or 1))
        if state is None:
            return None
        data = pickle.dumps(state)
        self.due = self.position + 1 + len(data) // STATE_BYTES
        return Note(self.position, self.due, data)

    def _return_to(self, batch: int) -> None:
        """Read, without collating, what was read before."""
        while self.position < batch:
            if self._calling("__next__", self._samples) is None:
                raise NotExact(
                    f"{self._where()} ended after {self.position} batches, and the run had read {batch} of it: "
                    "resume with the data it had, or start over under another run name."
                )
            self.position += 1

    def _calling(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except EngineError:
            raise
        except Exception as error:
            raise UserCodeError.of(f"{self._where()}, batch {self.position}, {what}", error) from error

    def _where(self) -> str:
        reader = self.reader
        worker = f", worker {self.shard} of {reader.shards}" if reader.shards else ""
        return f"{reader.where}{worker}"
