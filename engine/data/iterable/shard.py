"""One shard of an iterable data set in one pass: read from its start, or from a state."""

import logging
import pickle
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice, repeat
from typing import Any, Protocol

from torch import Tensor

from midstride.engine.data.data_owners import Nodes
from midstride.engine.data.iterable.collation import Collation
from midstride.engine.data.iterable.content_digest import content_digest, stack_of
from midstride.engine.data.iterable.shard_state import ShardAnswer, ShardExhausted, ShardRequest, ShardState, add_marks
from midstride.engine.data.iterable.sources import Source, replay_source, source_of
from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.data.torch_internals import make_worker_info, set_worker_info, stacks_tensors
from midstride.engine.errors import EngineError, NotExact, UserCodeError
from midstride.engine.objects.generator_search import shared_generators
from midstride.engine.objects.kinds.generators import seeder
from midstride.engine.seeds import mix
from midstride.engine.user_code import is_retryable

__all__ = ["STATE_BYTES", "Shard"]

log = logging.getLogger(__name__)

#: a state of up to this size is taken at every batch, one of up to twice this size at every second batch, and so on
STATE_BYTES = 16 * 1024
#: makes the seed for opening a shard differ from the seeds of its batches
_OPENING = (1 << 64) - 1


class Reader(Protocol):
    """The attributes of a `ShardReader` that its shards use."""

    batch_size: int | None
    drop_last: bool
    collation: Collation
    init: Callable[[int], None] | None
    key: int
    where: str
    shards: int
    is_whole: bool

    def dataset_for_pass(self, *, copied: bool = False, for_trial: bool = False) -> Any:
        """Return the data set for one shard in one pass."""
        ...


class Shard:
    """One shard in one pass.

    Args:
        reader: reader of the data set.
        request: request with the position to start at.
        saved: state to resume from; None reads the shard from its start.
        states: number of batches up to which states are taken; 0 ignores states of the data set.
        copied: whether to read a copy in any case.

    Raises:
        NotExact: it ends before that position, or the samples before it have changed.
        UserCodeError: the user's code raised.
    """

    #: digest of the last batch and its position, and its samples as one tensor if they can be stacked
    mark: int = 0
    _stack: Tensor | None = None

    def __init__(
        self,
        reader: Reader,
        request: ShardRequest,
        saved: ShardState | None,
        *,
        states: int = sys.maxsize,
        copied: bool = False,
    ) -> None:
        self.reader, self.number, self.shard, self.states_until = reader, request.number, request.shard, states
        self.key = mix(mix(reader.key, request.epoch), request.shard)
        self.position, self.due = (saved.batch, saved.next_at) if saved else (0, 1)
        #: digest of all samples read, and sum of the marks of their batches
        self.digest, self.total = (saved.digest, saved.total) if saved else (0, 0)
        self.over = False
        self._dataset = dataset = reader.dataset_for_pass(copied=copied or saved is not None, for_trial=copied)
        seed = mix(self.key, _OPENING)
        self.info: Any = None
        if reader.shards:
            self.info = make_worker_info(id=request.shard, num_workers=reader.shards, seed=seed >> 1, dataset=dataset)
        set_worker_info(self.info)
        self.seeders = [seeder(generator) for generator in shared_generators(dataset)]
        self._seed(seed)
        if reader.init is not None and reader.shards:
            self._call("worker_init_fn", reader.init, request.shard)
        state = pickle.loads(saved.data) if saved and states else None
        opened = partial(source_of, state=state) if states else replay_source
        self.source: Source = self._call("__iter__", opened, dataset, request.epoch, seed)
        # islice would call iter() each time, by which a data set that is its own iterator would start over.
        self.stream = map(next, repeat(self.source.iterator))
        #: states that were taken and not returned yet
        self._taken: list[ShardState] = []
        self._replay(request)

    def read(self, *, in_worker: bool) -> ShardAnswer | ShardExhausted:
        """Return the next batch with digests and due states; ShardExhausted at the end."""
        samples = self._next()
        if samples is None:
            return ShardExhausted()
        collation, seed = self.reader.collation, mix(self.key, 2 * self.position + 1)
        collate = partial(collation.batch, seed=seed, in_worker=in_worker)
        batch = self._stack if self._is_collated() else self._call("collate_fn", collate, samples)
        self.position += 1
        self._take_state()
        states, self._taken = self._taken, []
        count = None if self.reader.batch_size is None else len(samples)
        return ShardAnswer(batch, self.digest, states, self.mark, self.total, count)

    def _is_collated(self) -> bool:
        """Return whether the stack is the batch; not in a worker, with shared memory."""
        if self._stack is None or self.info is not None or self.reader.batch_size is None:
            return False
        return stacks_tensors(self.reader.collation.function)

    def next_digest(self) -> int | None:
        """Read a batch without collating it; return the digest of all samples read, None at the end."""
        if self._next() is None:
            return None
        self.position += 1
        return self.digest

    def contents(self) -> Nodes:
        """Return the attributes of a loader that stands for the data set; nothing of other data."""
        return self._dataset.contents() if self.reader.is_whole else {}

    def _next(self) -> Any:
        samples = self._call("__next__", self._samples)
        self._stack = None
        if samples is not None:
            self._stack = stack_of(samples)
            content = content_digest(samples, self._stack)
            self.digest = mix(self.digest, content)
            self.mark = mix(mix(self.key, self.position), content)
            self.total = add_marks(self.total, self.mark)
        return samples

    def _samples(self) -> Any:
        """Return the samples of the next batch; None at the end."""
        if self.over:
            return None
        # A loader's first batch continues the numbers of its opening: a thread that it starts can draw in either.
        if self.position or not self.reader.is_whole:
            self._seed(mix(self.key, 2 * self.position))
        wanted = self.reader.batch_size or 1
        samples = list(islice(self.stream, wanted))
        self.over = len(samples) < wanted
        if not samples or (self.over and self.reader.drop_last):
            return None
        return samples if self.reader.batch_size is not None else samples[0]

    def _seed(self, seed: int) -> None:
        """Seed the main generators, and generators that other shards and copies share."""
        seed_generators(seed)
        for number, set_seed in enumerate(self.seeders):
            set_seed(mix(seed, number))

    def _take_state(self) -> None:
        if not self.due <= self.position <= self.states_until:
            return
        try:
            saved = self.state()
        except UserCodeError as error:
            log.warning("%s\nIts states are no longer saved: a resumed run reads it again from its start.", error)
            self.due = sys.maxsize
        else:
            self._taken += [] if saved is None else [saved]

    def state(self) -> ShardState | None:
        """Return the state to resume from; None if the data set has none."""
        samples = self.position * (self.reader.batch_size or 1)
        state = self._call("state_dict", self.source.state, samples)
        if state is None:
            return None
        data = pickle.dumps(state)
        self.due = self.position + 1 + len(data) // STATE_BYTES
        return ShardState(self.position, self.due, data, self.digest, self.total)

    def _replay(self, request: ShardRequest) -> None:
        """Read the batches before that of `request`, without collating them.

        Raises:
            NotExact: there are fewer batches, or their samples have changed.
        """
        while self.position < request.batch:
            if self.next_digest() is None:
                raise NotExact(
                    f"{self._where()} ended after {self.position} batches, and the run had read {request.batch} of it: "
                    "resume with the data it had, or start over under another run name."
                )
            self._take_state()
            del self._taken[:-2]
        if request.digest is not None and self.digest != request.digest:
            raise NotExact(
                f"{self._where()} gives other samples than before the run died, in the {request.batch} batches that it "
                "had read. Its data have changed, or it draws from an unknown generator or in a thread: resume with "
                "the data it had, or start over under another run name."
            )

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function`, which calls user code, and return its result.

        Raises:
            UserCodeError: it raised an error that is not retryable.
        """
        try:
            return function(*arguments)
        except EngineError:
            raise
        except Exception as error:
            if is_retryable(error):
                raise
            raise UserCodeError.of(f"{self._where()}, batch {self.position}, {what}", error) from error

    def _where(self) -> str:
        reader = self.reader
        worker = f", worker {self.shard} of {reader.shards}" if reader.shards else ""
        return f"{reader.where}{worker}"
