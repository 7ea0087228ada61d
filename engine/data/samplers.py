"""Orders that a sampler of torch or of the user decides: drawn whole at an epoch's start, then shared by the ranks."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from midstride.engine.data.kept import private_generators
from midstride.engine.data.order import Fetch, Order, Sequence
from midstride.engine.data.permutation import Places
from midstride.engine.data.sampler_state import SamplerState
from midstride.engine.errors import NotExact, UserCodeError, UserError
from midstride.engine.seeds import mix

__all__ = ["Dealt", "Sampled"]

#: a sampler that gives more than so many items for each sample of its data set is taken for endless
_ENDLESS = 100


class Sampled(Sequence):
    """What a sampler gives, epoch by epoch, as if it had been run from the first epoch on.

    In each epoch the main generators are seeded by (key, epoch) while it runs, and put back. Its state from before
    the epoch belongs to a snapshot: put back in the next life, it gives the same epoch again.

    Args:
        sampler: a sampler or batch sampler.
        dataset: what it samples from.
        key: hash that decides what it draws from the main generators.
        what: the loader, for messages.
        shared: every rank has the same sampler, and they share what it gives.

    Raises:
        NotExact: run again from the same state, it gives another order.
        UserError: it gives nothing, or epochs of different lengths.
    """

    def __init__(self, sampler: Any, dataset: Any, key: int, what: str, *, shared: bool = True) -> None:
        self._sampler, self._key = sampler, key
        self._what = f"the {what} loader's {type(sampler).__name__}"
        self._most = _ENDLESS * (len(dataset) if hasattr(dataset, "__len__") else 1_000_000) + 1_000_000
        self._state = SamplerState(sampler, dataset)
        self._begin: dict[str, Any] = {}
        self._items: list[Any] | NDArray[np.int64] = []
        digest = self._rehearsed()
        self._named = type(sampler).__name__ + (f", order {digest}" if shared else "")

    @property
    def facts(self) -> dict[str, Any]:
        """The sampler's type, and a digest of its first epoch if that is the same on every rank."""
        return {"sampler": self._named}

    def _rehearsed(self) -> str:
        """Run two epochs twice; return a digest of the first."""
        epochs = [self._run(epoch) for epoch in (0, 1)]
        self._state.put({})
        again = [self._run(epoch) for epoch in (0, 1)]
        self._state.put({})
        if [_digest(items) for items in epochs] != [_digest(items) for items in again]:
            raise NotExact(
                f"{self._what} gives another order when it is run again from the same state: it draws from a source "
                "that cannot be put back, or keeps what cannot be found. Keep counters and generators as attributes, "
                "or give it state_dict and load_state_dict."
            )
        lengths = [len(items) for items in epochs]
        if lengths[0] != lengths[1]:
            raise UserError(
                f"{self._what} gives {lengths[0]} items in one epoch and {lengths[1]} in the next; "
                "all epochs need the same number."
            )
        if not lengths[0]:
            raise UserError(f"{self._what} gives nothing: there is nothing to read.")
        self._length = lengths[0]
        return _digest(epochs[0])

    def __len__(self) -> int:
        return self._length

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Run the sampler for `epoch`."""
        if resumed:
            now = self._state.taken()
            self._state.put(self._begin)
        else:
            self._set_epoch(epoch)
            self._begin = self._state.taken()
        self._items = self._run(epoch, set_epoch=False)
        if resumed:
            self._state.put(now)
        if len(self._items) != self._length:
            raise UserError(
                f"{self._what} gives {len(self._items)} items in epoch {epoch}, {self._length} in the first; "
                "all epochs need the same number."
            )

    def at(self, places: Places) -> list[Any]:
        """Return the items at `places`."""
        if isinstance(self._items, list):
            return [self._items[place] for place in places.tolist()]
        return list(self._items[places].tolist())

    def items(self) -> list[Any]:
        """Return all items of the epoch that is open."""
        return self.at(np.arange(self._length))

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, now and before the epoch that is open."""
        return {"begin": self._begin, "now": self._state.taken()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take both back."""
        self._begin = state_dict["begin"]
        self._state.put(state_dict["now"])

    def _set_epoch(self, epoch: int) -> None:
        for sampler in self._state.samplers:
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def _run(self, epoch: int, *, set_epoch: bool = True) -> list[Any] | NDArray[np.int64]:
        try:
            with private_generators(mix(self._key, epoch)):
                if set_epoch:
                    self._set_epoch(epoch)
                items = [copy.copy(item) if type(item) is list else item for item in islice(self._sampler, self._most)]
        except Exception as error:
            raise UserCodeError.of(f"{self._what}, epoch {epoch}", error) from error
        if len(items) == self._most:
            raise NotExact(f"{self._what} does not end: let it end after an epoch's worth of items.")
        return np.array(items, dtype=np.int64) if all(type(item) is int for item in items) else items


def _digest(items: list[Any] | NDArray[np.int64]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(items).encode() if isinstance(items, list) else items.tobytes())


@dataclass
class Dealt(Order):
    """Whole batches, as a batch sampler makes them, dealt to the ranks in turn.

    Args:
        sequence: whose items are batches.
        rank: this rank, 0 <= rank < size.
        size: ranks that share the batches: batch q goes to rank q mod size.
        rest: "padded" gives every rank the same number, repeating batches from the start; "kept" does not.
        own: the sequence holds this rank's batches alone.
    """

    sequence: Sampled
    rank: int = 0
    size: int = 1
    rest: Literal["padded", "kept"] = "padded"
    own: bool = False
    batch_size: int | None = None
    global_batch_size: int | None = None

    def __len__(self) -> int:
        """Return the batches this rank reads in an epoch."""
        batches = len(self.sequence)
        if self.own:
            return batches
        return -(-batches // self.size) if self.rest == "padded" else len(range(self.rank, batches, self.size))

    def fetches(self, key: int, start: int) -> Iterator[Fetch]:
        """Yield the batches of the epoch that is open, from batch `start` on.

        Samples stand where they stand in all batches one after the other; a repeated batch stands where it stood.
        """
        batches = [list(batch) for batch in self.sequence.items()]
        firsts = np.cumsum([0, *map(len, batches)])
        for number in range(start, len(self)):
            if self.own:  # places of ranks alternate
                yield Fetch(key, int(firsts[number]) * self.size + self.rank, self.size, batches[number])
            else:
                batch = (number * self.size + self.rank) % len(batches)
                yield Fetch(key, int(firsts[batch]), 1, batches[batch])
