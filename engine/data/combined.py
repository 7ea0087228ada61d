"""Several loaders read as one, side by side or one after the other.

mode              an epoch ends                   a loader that ends earlier
min_size          with the shortest loader        -
max_size_cycle    with the longest                starts over, in another order
max_size          with the longest                gives None
sequential        with the last loader            is followed by the next

Epochs of a loader may differ in length, so each loader has a position of its own: the number of its pass, and of the
batch in it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from midstride.engine.code_origin import module_of
from midstride.engine.data.bad_samples import BadSample
from midstride.engine.data.data_check import DataDigests
from midstride.engine.data.limits import limited
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.whole_loader import is_loader
from midstride.engine.errors import UserError
from midstride.engine.trees import map_leaves, named_leaves

__all__ = ["CombinedLoader", "CombinedResumableLoader", "Mode", "convert_combined", "named_loaders"]

_MISSING = object()
Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]


class CombinedLoader:
    """Several loaders, read side by side or one after the other.

    Return it from `train_dataloader`, `val_dataloader` and so on. A dict, list or nest of loaders is treated as a
    CombinedLoader with mode `max_size_cycle` in training and `sequential` in evaluation. A batch is a nest like
    `loaders`, with a batch in place of each loader; in mode `sequential` it is one loader's batch.

    Args:
        loaders: DataLoaders in dicts, lists and tuples, which may be nested.
        mode: `min_size` ends with the shortest loader; `max_size_cycle` with the longest, and others start over;
            `max_size` with the longest, and others give None; `sequential` reads one loader after the other.

    Raises:
        UserError: there is no such mode.
    """

    def __init__(self, loaders: Any, mode: Mode = "min_size") -> None:
        if mode not in get_args(Mode):
            raise UserError(f"CombinedLoader has no mode {mode!r}: choose one of {', '.join(get_args(Mode))}")
        self.loaders = loaders
        self.mode: Mode = mode


def convert_combined(given: Any) -> Any:
    """Return `given`, converted if it is a CombinedLoader of Lightning's."""
    kind: Any = type(given)
    if kind.__name__ == "CombinedLoader" and module_of(kind).partition(".")[0] in ("lightning", "pytorch_lightning"):
        return CombinedLoader(given.iterables, given._mode)
    return given


def named_loaders(loaders: Any, name: str) -> tuple[list[tuple[str, DataLoader[Any]]], Callable[[Sequence[Any]], Any]]:
    """Return all named loaders of a nest, and a function that nests values in the same form.

    Raises:
        UserError: the nest is empty, or has a leaf that is no DataLoader.
    """
    named = [(where.strip(), leaf) for where, leaf in named_leaves(loaders, f"{name} ")]
    if not named:
        raise UserError(f"{name} is an empty {type(loaders).__name__}: put a DataLoader in it, or return None.")
    for path, leaf in named:
        if not is_loader(leaf):
            raise UserError(f"{path} is a {type(leaf).__name__}; a torch.utils.data.DataLoader is needed.")

    def nest_of(values: Sequence[Any]) -> Any:
        each = iter(values)
        return map_leaves(lambda leaf: next(each), loaders)

    return named, nest_of


class _Stream:
    """The batches of one of several loaders, over all its passes.

    Args:
        loader: loader to read.
        first: number of its first pass in this epoch, which decides order and random numbers.
        lap: number of passes completed in this epoch.
        position: number of batches read in the current pass.
    """

    def __init__(self, loader: ResumableLoader, first: int, lap: int = 0, position: int = 0) -> None:
        self.loader, self.first, self.lap, self.position = loader, first, lap, position
        self._iterator: Iterator[Any] | None = None
        #: number of passes that were started here, without one that was resumed
        self.begun = 0

    @property
    def has_ended(self) -> bool:
        """Whether its last batch was returned in this epoch."""
        return self.lap > 0

    @property
    def next_first(self) -> int:
        """Number of its first pass in the next epoch."""
        return self.first + self.lap + (self.position > 0)

    def open(self) -> Iterator[Any]:
        """Return the iterator over the current pass, whose length the loader knows from now on."""
        if self._iterator is None:
            self.begun += self.position == 0
            self._iterator = self.loader.batches(self.first + self.lap, self.position)
        return self._iterator

    def read(self) -> Any:
        """Return the next batch, of a new pass if one has ended; `_MISSING` if a pass has no batch."""
        batch = next(self.open(), _MISSING)
        self.position += 1
        if self.loader.at_end or batch is _MISSING:
            self.lap, self.position, self._iterator = self.lap + 1, 0, None
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"first": self.first, "lap": self.lap, "position": self.position}

    def again(self) -> "_Stream":
        """Return a stream at the same position."""
        return _Stream(self.loader, **self.state_dict())


class CombinedResumableLoader(ResumableLoader):
    """Several loaders as one.

    Args:
        name: name in messages.
        loaders: loaders to read, in the order of the nest.
        nest: function that makes a batch of the loaders' batches.
        mode: see the table above.
        limit: share of the batches, or number of batches.

    Raises:
        UserError: a loader without a batch would have to start over, or the limit is a share of an unknown number.
    """

    batch_size = None

    def __init__(
        self,
        name: str,
        loaders: Sequence[ResumableLoader],
        nest: Callable[[Sequence[Any]], Any],
        mode: Mode,
        limit: float,
    ) -> None:
        self.name, self.loaders, self.mode = name, list(loaders), mode
        self._nest, self._limit = nest, limit
        self.is_sized = all(loader.is_sized for loader in loaders)
        self.fixed_world = "several loaders are read at once, each in batches of its own"
        if mode == "max_size_cycle" and any(loader.estimated_batches == 0 for loader in loaders):
            raise UserError(f"{name}: a loader without a batch cannot start over. Leave it out, or use mode max_size.")
        if not (self.is_sized or isinstance(limit, int) or limit in (0.0, 1.0)):
            raise UserError(
                f"{name}: a limit of {limit} is a share of its batches, whose number is unknown until they are read. "
                f"Give a number of batches, or 1.0 for all."
            )
        self._streams = [_Stream(loader, 0) for loader in self.loaders]
        #: epoch and batch of `_streams`; None if they were not read
        self._position: tuple[int, int] | None = None
        self._most: int | None = None  #: number of batches in the epoch; None if it ends with a loader
        endless = [loader.endless for loader in loaders]
        if endless and None not in (endless if mode == "min_size" else endless[:0]):
            self.endless = next(filter(None, endless), None)

    def __len__(self) -> int:
        """Return the number of batches in an epoch on this rank, after the limit."""
        if not self.is_sized:
            raise TypeError(f"the number of batches of {self.name} is unknown until they are read")
        return self.estimated_batches or 0

    @property
    def estimated_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        whole = self.unlimited_batches
        if whole is None:
            return self._limit if isinstance(self._limit, int) else None
        return limited(whole, self._limit)

    @property
    def unlimited_batches(self) -> int | None:
        """Number of batches in an epoch before the limit; None if a loader does not know its length."""
        shortest = self.mode == "min_size"
        lengths = [loader.estimated_batches for loader in self.loaders if not (shortest and loader.endless)]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths) or not known:
            return None
        return sum(known) if self.mode == "sequential" else (min if self.mode == "min_size" else max)(known)

    def order_identity(self) -> dict[str, Any]:
        """Return mode and order identities of the loaders."""
        return {"combined": self.mode, "loaders": [loader.order_identity() for loader in self.loaders]}

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Open `epoch`; return an iterator over its batches from batch `start` on."""
        self._streams = self._streams_at(epoch, start)
        if (
            self.mode != "sequential"
        ):  # else each is opened in its turn, since training may change its sampler until then
            for stream in self._streams:
                if not stream.has_ended:
                    stream.open()
        if not start or self._most is None:
            self._most = None if self._limit == 1.0 and not isinstance(self._limit, int) else self.estimated_batches
        return self._read(epoch, start)

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        if self._limit == 0 or (self._most is not None and start >= self._most):
            return
        number, begun = start, 0
        self.at_end = False
        while not self.at_end:
            if (batch := self._next_batch()) is _MISSING:
                return
            self.begins_pass = self.is_sized and self._passes_begun() > begun
            begun, number = self._passes_begun(), number + 1
            self._position = epoch, number
            self.at_end = number == self._most or self._is_over()
            yield batch

    def _next_batch(self) -> Any:
        streams = self._streams
        if self.mode == "sequential":
            for stream in streams:
                if not stream.has_ended and (batch := stream.read()) is not _MISSING:
                    self.weight = stream.loader.weight
                    return batch
            return _MISSING
        over = self.mode == "max_size"
        row = [_MISSING if over and stream.has_ended else stream.read() for stream in streams]
        missing = [batch is _MISSING for batch in row]
        if all(missing) or (any(missing) and self.mode == "min_size"):
            return _MISSING
        self.weight = streams[missing.index(False)].loader.weight
        return self._nest([None if batch is _MISSING else batch for batch in row])

    def _passes_begun(self) -> int:
        return sum(stream.begun for stream in self._streams)

    def _is_over(self) -> bool:
        ended = [stream.has_ended for stream in self._streams]
        return any(ended) if self.mode == "min_size" else all(ended)

    def _streams_at(self, epoch: int, start: int) -> list[_Stream]:
        """Return the streams at batch `start`: of the loaded state, or by lengths of all epochs."""
        if self._position == (epoch, start) or (start and not self.is_sized):
            return [stream.again() for stream in self._streams]
        if not self.is_sized or (self._position is not None and (self._position[0], start) == (epoch - 1, 0)):
            return [_Stream(stream.loader, stream.next_first) for stream in self._streams]
        streams, before = [], 0
        for loader in self.loaders:
            length = len(loader)
            laps = -(-len(self) // length) if self.mode == "max_size_cycle" else 1
            offset = start - before if self.mode == "sequential" else start
            lap, position = divmod(offset, length) if offset > 0 and length else (int(length == 0), 0)
            streams.append(_Stream(loader, epoch * laps, lap, position))
            before += length
        return streams

    def data_digests(self) -> Sequence[DataDigests]:
        """Return digests of samples of all loaders, to compare them."""
        return [found for loader in self.loaders for found in loader.data_digests()]

    def take_bad_samples(self) -> list[BadSample]:
        """Return the samples of all loaders that could not be read since the last call."""
        return [bad for loader in self.loaders for bad in loader.take_bad_samples()]

    def accept_data(self) -> None:
        """Compare no more with the samples of earlier attempts."""
        for loader in self.loaders:
            loader.accept_data()

    def shared_order(self) -> str | None:
        """Return digests of the orders that all ranks share in the current passes."""
        orders = [loader.shared_order() for loader in self.loaders]
        return None if {*orders} <= {None} else " ".join(map(str, orders))

    def changed_in_pass(self) -> str | None:
        """Return text on the first loader whose data have changed, or None."""
        return next(filter(None, (loader.changed_in_pass() for loader in self.loaders)), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loaders, and their positions if lengths are unknown."""
        state = {
            "streams": [stream.state_dict() for stream in self._streams],
            "parts": [loader.state_dict() for loader in self.loaders],
        }
        at = {} if self._position is None else {"at": [*self._position]}
        return {**state, **at, **({} if self._most is None else {"most": self._most})}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore states and positions."""
        for loader, state in zip(self.loaders, state_dict["parts"], strict=True):
            loader.load_state_dict(state)
        if state_dict["streams"]:
            streams = zip(self.loaders, state_dict["streams"], strict=True)
            self._streams = [_Stream(loader, **state) for loader, state in streams]
        at = state_dict.get("at")
        self._position, self._most = None if at is None else (at[0], at[1]), state_dict.get("most")

    def restored(self) -> None:
        """Call `restored` of every loader."""
        for loader in self.loaders:
            loader.restored()

    def close(self) -> None:
        """Close every loader."""
        for loader in self.loaders:
            loader.close()

    def clone(self) -> "CombinedResumableLoader":
        """Return a loader that can load a state while this one is read."""
        clone = copy.copy(self)
        clone.loaders = [loader.clone() for loader in self.loaders]
        clone._streams = [
            _Stream(own, **old.state_dict()) for own, old in zip(clone.loaders, self._streams, strict=True)
        ]
        return clone
