"""Orders given by a sampler, torch's or the user's: drawn at an epoch's start, and shared by the ranks."""

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import isgeneratorfunction
from itertools import islice, repeat
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from midstride.engine.data.order import BatchOrder, BatchRequest, SampleOrder
from midstride.engine.data.permutation import Positions
from midstride.engine.data.rng.isolation import seeded_rng
from midstride.engine.data.sampler_state import SamplerState, samplers_in
from midstride.engine.errors import NotExact, UnsupportedState, UserCodeError, UserError
from midstride.engine.objects.generator_search import find_generators
from midstride.engine.seeds import mix
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.differences import differences
from midstride.engine.user_code import is_retryable

__all__ = ["BatchSamplerOrder", "SamplerOrder", "as_items", "pack_items", "unpack_items"]

log = logging.getLogger(__name__)

#: plain indices as an array of shape (n,), other items as a list
Items = list[Any] | NDArray[np.int64]
#: items per sample of the data set beyond which a sampler is considered endless
_ENDLESS = 100
_WAY_OUT = "Keep counters and generators as attributes made in __init__, or give it state_dict and load_state_dict."


class SamplerOrder(SampleOrder):
    """The items of a sampler, which is run to its end at the start of each epoch.

    While it runs, the main generators are seeded by (key, epoch); they are restored afterwards. The items of the epoch
    are part of snapshots, since a sampler that depends on training would give others if it ran again.

    Args:
        sampler: a sampler or batch sampler; it and its attributes are changed in place only.
        loader: loader of the sampler.
        key: hash that seeds the main generators.
        what: name of the loader in messages.
        shared: whether every rank has the same sampler, and they share its items.

    Raises:
        NotExact: after its state is restored, it gives another order.
        UserError: it gives no items, or different numbers of items in two epochs.
    """

    def __init__(self, sampler: Any, loader: DataLoader[Any], key: int, what: str, *, shared: bool = True) -> None:
        self._sampler, self._dataset, self._key = sampler, loader.dataset, key
        self._what = f"the {what} loader's {type(sampler).__name__}"
        samples: Any = self._dataset
        self._max_items = _ENDLESS * (len(samples) if hasattr(samples, "__len__") else 1_000_000) + 1_000_000
        self._state, self._base_seed = SamplerState(sampler, self._dataset), BaseSeed(loader, sampler)
        self._items: Items = []
        self._state_at_start: dict[str, Any] = {}
        self._state_after_run: dict[str, Any] | None = None
        #: digest of the epoch's items, if the snapshot could not hold them and the sampler has to run again
        self._expected: str | None = None
        #: whether no warning of changes within an epoch is due; torch's samplers draw all items at once, too
        self._has_warned = not _is_lazy(sampler)
        digest = self._dry_run()
        self._name = type(sampler).__name__ + (f", order {digest}" if shared else "")

    @property
    def identity(self) -> dict[str, Any]:
        """The sampler's type, and a digest of its first epoch if all ranks share it."""
        return {"sampler": self._name}

    def _dry_run(self) -> str:
        """Run copies of the sampler for two epochs, also from restored states; return a digest of the first epoch."""
        built = self._state.full()
        one, other, resumed = (_copy_of(self._sampler, self._dataset) for _ in range(3))
        epochs = [self._run(one, 0)]
        ended = SamplerState(one, self._dataset)
        between, graph = ended.full(), ended.graph_state()
        epochs.append(self._run(one, 1))
        # Copies may share generators, and objects that cannot be copied.
        SamplerState(other, self._dataset).restore_full(built)
        again = [self._run(other, 0)]
        try:
            begun = SamplerState(resumed, self._dataset)
            begun.restore_full(between)
            begun.restore_graph_state(graph)
        except NotExact as error:
            raise NotExact(f"{self._what} cannot be given its state back: {error}. {_WAY_OUT}") from error
        except Exception as error:
            raise UserCodeError.of(f"{self._what}, given its state back", error) from error
        again.append(self._run(resumed, 1))
        self._state.restore_full(built)
        if [*map(digest_of_items, epochs)] != [*map(digest_of_items, again)]:
            raise NotExact(
                f"{self._what} gives another order when it is run again from the same state: it draws from a source "
                f"that cannot be put back, or keeps what cannot be found. {_WAY_OUT}"
            )
        return self._checked_indices(*epochs)

    def _checked_indices(self, first: Items, second: Items) -> str:
        if len(first) != len(second):
            raise UserError(
                f"{self._what} gives {len(first)} items in one epoch and {len(second)} in the next; "
                "all epochs need the same number."
            )
        if not len(first):
            raise UserError(f"{self._what} gives nothing: there is nothing to read.")
        self._length = len(first)
        return digest_of_items(first)

    def __len__(self) -> int:
        return self._length

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Run the sampler for `epoch`; if resumed, the items are those of the state."""
        if resumed:
            self._run_again(epoch)
            return
        if not self._has_warned and self._state_after_run is not None:
            self._warn_of_change(self._state_after_run)
        self._state_at_start, self._expected = self._state.changes(), None
        self._items = self._run(self._sampler, epoch)
        self._state_after_run = None if self._has_warned else self._state.changes()
        if len(self._items) != self._length:
            raise UserError(
                f"{self._what} gives {len(self._items)} items in epoch {epoch}, {self._length} in the first; "
                "all epochs need the same number."
            )

    def _run_again(self, epoch: int) -> None:
        """Run the sampler from its state at the start of the epoch, if its items could not be written."""
        if self._expected is None:
            return
        now = self._state.changes()
        self._state.restore(self._state_at_start)
        self._items = self._run(self._sampler, epoch)
        self._state.restore(now)
        if (digest := digest_of_items(self._items)) != self._expected:
            raise NotExact(
                f"{self._what} gives another order in epoch {epoch} than before the run died (digest {self._expected}, "
                f"now {digest}): it reads what training changes, and its items cannot be written. Let it give plain "
                "numbers or text, lists or tuples of them, or start over under another run name."
            )

    def _warn_of_change(self, after: dict[str, Any]) -> None:
        """Warn once if training changes a sampler within an epoch; in plain PyTorch it would draw during the epoch."""
        if differences(after, self._state.changes()):
            self._has_warned = True
            log.warning(
                "training changes %s while its epoch is under way. Here it is run whole at the start of each epoch: "
                "what changes takes effect with the next one.",
                self._what,
            )

    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the items at `positions`."""
        if isinstance(self._items, list):
            return [self._items[position] for position in positions.tolist()]
        return list(self._items[positions].tolist())

    def items(self) -> list[Any]:
        """Return all items of the current epoch."""
        return self.indices_at(np.arange(self._length))

    def digest(self) -> str:
        """Return a digest of the items of the current epoch."""
        return digest_of_items(self._items)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, and the items of the current epoch."""
        packed = pack_items(self._items)
        if packed is None:
            packed = {"begin": self._state_at_start, "digest": digest_of_items(self._items)}
        return {"now": self._state.changes(), "items": packed, "base_seed": self._base_seed.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore state and items."""
        packed = state_dict["items"]
        if "digest" in packed:
            self._state_at_start, self._expected = packed["begin"], packed["digest"]
        else:
            self._items = unpack_items(packed)
        self._state.restore(state_dict["now"])
        self._base_seed.load_state_dict(state_dict["base_seed"])

    def clone(self) -> "SamplerOrder":
        """Return this order with a copy of its sampler, in the state in which it was built."""
        clone = copy.copy(self)
        clone._sampler = _copy_of(self._sampler, self._dataset)
        clone._state = self._state.for_copy(clone._sampler)
        clone._base_seed = copy.copy(self._base_seed)
        return clone

    def _run(self, sampler: Any, epoch: int) -> Items:
        try:
            with seeded_rng(mix(self._key, epoch)):
                for one in samplers_in(sampler):
                    if callable(set_epoch := getattr(one, "set_epoch", None)):
                        set_epoch(epoch)
                # islice calls iter() again, on which a sampler that is its own iterator may start over.
                given = islice(map(next, repeat(self._base_seed.iterate(sampler, epoch))), self._max_items)
                items = [copy.copy(item) if type(item) is list else item for item in given]
        except Exception as error:
            if is_retryable(error):
                raise
            raise UserCodeError.of(f"{self._what}, epoch {epoch}", error) from error
        if len(items) == self._max_items:
            raise NotExact(f"{self._what} does not end: let it end after an epoch's worth of items.")
        return as_items(items)


def _is_lazy(sampler: Any) -> bool:
    """Return whether `sampler` may draw items one by one, as they are read."""
    iterate = type(sampler).__iter__
    return isgeneratorfunction(iterate) and iterate.__module__.partition(".")[0] != "torch"


def _copy_of(sampler: Any, dataset: Any) -> Any:
    """Return a copy of `sampler` over the same data; itself if it cannot be copied."""
    try:
        return copy.deepcopy(sampler, {id(dataset): dataset})
    except Exception:
        return sampler


@dataclass
class BatchSamplerOrder(BatchOrder):
    """The batches of a batch sampler, given to the ranks in turn.

    Args:
        sequence: order whose items are batches.
        rank: this rank, 0 <= rank < size.
        size: number of ranks that share the batches: batch q goes to rank q mod size.
        rest: "padded" repeats batches from the start, so that all ranks have the same number; "kept" does not.
        own: whether the sequence holds the batches of this rank only.
    """

    sequence: SamplerOrder  # pyright: ignore[reportIncompatibleVariableOverride]  # a frozen dataclass
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

    def requests(self, key: int, start: int) -> Iterator[BatchRequest]:
        """Yield requests for the batches of the current epoch, from batch `start` on.

        The position of a sample is that in all batches one after the other; a repeated batch keeps its positions.
        """
        batches = [list(batch) for batch in self.sequence.items()]
        firsts = np.cumsum([0, *map(len, batches)])
        for number in range(start, len(self)):
            if self.own:  # positions of ranks alternate
                yield BatchRequest(key, int(firsts[number]) * self.size + self.rank, self.size, batches[number])
            else:
                batch = (number * self.size + self.rank) % len(batches)
                yield BatchRequest(key, int(firsts[batch]), 1, batches[batch])


class BaseSeed:
    """Iterates over a sampler as `DataLoader.__iter__` does, which first draws a seed for its workers.

    Args:
        loader: loader that draws the seed from its generator.
        sampler: sampler of the loader, which may share that generator.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._dataset = loader.dataset
        used = find_generators(sampler, beside=self._dataset).items() if loader.generator is not None else ()
        self._path = next((path for path, generator in used if generator is loader.generator), None)
        #: whether persistent workers keep one seed; a resumed run draws as it began, with any workers
        self._is_drawn_once = loader.persistent_workers and loader.num_workers > 0
        #: whether the loader calls `iter(sampler)` before it draws the seed
        self._is_asked_first = loader.batch_sampler is None or loader.batch_sampler is sampler

    def iterate(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """Return an iterator over `sampler`, which is the loader's or a copy of it, for `epoch`."""
        if self._path is None or (epoch and self._is_drawn_once):
            return iter(sampler)
        items = iter(sampler) if self._is_asked_first else None
        generator = find_generators(sampler, beside=self._dataset)[self._path]
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        return iter(sampler) if items is None else items

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of the samples depends on; nothing if the sampler does not share the generator."""
        return {} if self._path is None else {"is_drawn_once": self._is_drawn_once}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Continue to draw as the loader did whose state it is."""
        self._is_drawn_once = state_dict.get("is_drawn_once", self._is_drawn_once)


def as_items(given: list[Any]) -> Items:
    """Return the items of a sampler, as an array if all are of type int."""
    return np.array(given, dtype=np.int64) if all(type(item) is int for item in given) else given


def digest_of_items(items: Items) -> str:
    """Return a digest of `items` in their order."""
    return xxhash.xxh3_64_hexdigest(repr(items).encode() if isinstance(items, list) else items.tobytes())


def pack_items(items: Items) -> dict[str, Any] | None:
    """Return `items` as a dict that can be written to a snapshot; None if they cannot be written."""
    if not isinstance(items, list):
        return {"indices": _smallest(items)}
    if not items:
        return {"items": []}
    kinds = {*map(type, items)}
    if len(kinds) == 1 and issubclass(kind := next(iter(kinds)), np.integer):
        return {"indices": np.array(items, dtype=kind), "scalars": True}
    if kinds <= {list} and all(type(index) is int for item in items for index in item):
        flat = np.array([index for item in items for index in item], dtype=np.int64)
        return {"indices": _smallest(flat), "sizes": _smallest(np.array([len(item) for item in items], dtype=np.int64))}
    try:
        encode_lazily(items)
    except UnsupportedState:
        return None
    return {"items": items}


def unpack_items(packed: dict[str, Any]) -> Items:
    """Return the items from the result of `pack_items`."""
    if "items" in packed:
        return list(packed["items"])
    if "scalars" in packed:
        return list(packed["indices"])
    indices: NDArray[np.int64] = packed["indices"].astype(np.int64)
    if "sizes" not in packed:
        return indices
    ends = np.cumsum(packed["sizes"].astype(np.int64))
    return [batch.tolist() for batch in np.split(indices, ends[:-1])]


def _smallest(indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return `indices` in the smallest integer dtype that holds them."""
    if len(indices) == 0:
        return indices
    return indices.astype(np.promote_types(np.min_scalar_type(indices.min()), np.min_scalar_type(indices.max())))
