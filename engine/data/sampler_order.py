"""Orders of a sampler, torch's or the user's: drawn at an epoch's start, shared by ranks."""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isgeneratorfunction
from itertools import islice, repeat
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from midstride.engine.code_origin import module_of
from midstride.engine.data.drawn_items import (
    DrawnItems,
    Items,
    as_items,
    digest_of_items,
    is_plain,
    joined,
    pack_items,
    unpack_items,
)
from midstride.engine.data.order import BLOCK, ENDLESS, SampleOrder
from midstride.engine.data.permutation import Positions
from midstride.engine.data.rng.isolation import seeded_rng
from midstride.engine.data.running_generator import keep_generators
from midstride.engine.data.sampler_state import SamplerState, samplers_in
from midstride.engine.errors import EngineError, NotExact, UserCodeError, UserError
from midstride.engine.objects.attributes import own_dict
from midstride.engine.objects.generator_search import find_generators
from midstride.engine.seeds import mix
from midstride.engine.state.differences import differences
from midstride.engine.user_code import is_retryable

__all__ = ["SamplerOrder"]

log = logging.getLogger(__name__)

#: number of first items by which ranks compare orders that are drawn in blocks
_COMPARED = 64
#: types of samplers without code of their own
_SIZED = (list, tuple, range, np.ndarray, torch.Tensor)
_OTHER_ORDER = (
    "{what} gives another order when it runs again from the same state: it draws from a source that cannot be "
    "restored, or has unknown state. Keep counters and generators as attributes made in __init__, or give it "
    "state_dict and load_state_dict that hold all of its state."
)
_WAY_OUT = "Keep counters and generators as attributes made in __init__, or give it state_dict and load_state_dict."


class SamplerOrder(SampleOrder):
    """The items of a sampler, whose epochs may have any length.

    A sampler is run to its end at the start of each epoch, or as far as a limit needs its items. The items of the epoch
    are part of snapshots, since a sampler that depends on training would give others if it ran again. A sampler that
    does not end there is drawn in blocks instead: a resumed run starts from its state at the start of the epoch, and
    draws the items before its position again.

    While it runs, the main generators are seeded by (key, epoch), or by (key, epoch, block); they are restored
    afterwards.

    Args:
        sampler: a sampler or batch sampler; it and its attributes are changed in place only.
        loader: loader of the sampler.
        key: hash that seeds the main generators.
        what: name of the loader in messages.
        shared: whether every rank has the same sampler, and they share its items.
        most: number of items that an epoch needs at most; None for all.

    Raises:
        NotExact: after its state is restored, it gives another order.
        UserError: it gives no items.
    """

    #: whether the sampler says the end of an epoch as it is given, since it was run before
    _is_given_at_end: bool = False

    def __init__(
        self,
        sampler: Any,
        loader: DataLoader[Any],
        key: int,
        what: str,
        *,
        shared: bool = True,
        most: int | None = None,
    ) -> None:
        name, sampler = type(sampler).__name__, keep_generators(sampler)
        self._sampler, self._dataset, self._key = sampler, loader.dataset, key
        self._what = f"the {what} loader's {name}"
        self._most = ENDLESS if most is None else most
        self._largest = _largest_epoch(sampler, loader.dataset)
        self._state, self._base_seed = SamplerState(sampler, self._dataset), BaseSeed(loader, sampler)
        self._items = DrawnItems()
        #: the epoch that is drawn in blocks; None at its end
        self._drawing: _Drawing | None = None
        self._epoch = 0
        #: whether the sampler's own state is a position in an epoch, so that it gives the rest of the epoch first
        self._is_position = False
        self._has_position = False  #: whether a state with a position was loaded, which no epoch has used yet
        #: state that was loaded, and what the sampler says since, which may be known only when it is run
        self._given: tuple[dict[str, Any], dict[str, Any]] | None = None
        #: whether an epoch that is drawn in blocks is under way
        self._is_under_way = False
        self._state_at_start: dict[str, Any] = {}
        self._state_after_draw: dict[str, Any] | None = None
        #: digest of the epoch's items as they were drawn, if snapshots cannot hold them: the sampler has to run again
        self._expected: str | None = None
        #: whether no warning of changes within an epoch is due; torch's samplers draw all items at once, too
        self._has_warned = not _is_lazy(sampler)
        digest = self._dry_run()
        self._name = name + (f", order {digest}" if shared else "")

    @property
    def identity(self) -> dict[str, Any]:
        """The sampler's type, and a digest of its first epoch if all ranks share it."""
        return {"sampler": self._name}

    def __len__(self) -> int:
        if not self.is_sized:
            raise TypeError(f"{self._what} is drawn in blocks: its length is unknown until it ends")
        return len(self._items)

    def open(self, epoch: int, *, resumed: bool) -> None:
        """Run the sampler for `epoch`; if resumed, the items are those of the state."""
        self._epoch = epoch
        if not resumed:
            if self._has_position and self._is_position:
                self._read_rest(self._sampler)
            self._has_position, self._given = False, None
        if not self.is_sized:
            self._open_in_blocks(resumed=resumed)
        elif resumed:
            self._run_again(epoch)
        else:
            self._state_at_start = self._state.changes()
            self._begin(self._whole(self._run(self._sampler, epoch), epoch))
            self._state_after_draw = None if self._has_warned else self._state.changes()

    def _open_in_blocks(self, *, resumed: bool) -> None:
        if resumed:
            self._restore_start()
            self._has_position, self._given = False, None
        else:
            self._state_at_start = self._state.changes()
        self._begin(None)
        self._is_under_way, self._state_after_draw = True, None
        self._drawing = _Drawing(self, self._sampler, self._epoch)

    def _begin(self, items: Items | None) -> None:
        """Start an epoch with its items, before the data set may change them; None in blocks."""
        self._items.begin(items)
        is_written = items is None or is_plain(items) or pack_items(items) is not None
        self._expected = None if items is None or is_written else digest_of_items(items)

    def _run_again(self, epoch: int) -> None:
        """Run the sampler from its state at the epoch's start, if its items were not written."""
        if self._expected is None:
            return
        now = self._state.changes()
        self._restore_start()
        items = self._whole(self._run(self._sampler, epoch), epoch)
        self._items.begin(items)
        self._state.restore(now)
        if (digest := digest_of_items(items)) != self._expected:
            raise NotExact(
                f"{self._what} gives another order in epoch {epoch} than before the run died (digest {self._expected}, "
                f"now {digest}). It depends on state that training changes, and its items cannot be saved. Let it "
                f"yield plain numbers or text, lists or tuples of them, or start over under another run name."
            )

    def _restore_start(self) -> None:
        """Restore the sampler as it was before the epoch."""
        self._restore(self._state.restore, self._state_at_start, self._sampler)
        if self._is_position and (self._state_at_start or self._is_given_at_end):
            self._read_rest(self._sampler)

    def count_to(self, position: int) -> int:
        """Return the number of items in the epoch, or of drawn ones, at least `position`, in blocks."""
        if self.is_sized:
            return len(self._items)
        while self._drawing is not None and self._items.end < position:
            block = self._drawing.next_block(min(BLOCK, self._most - self._items.end))
            self._items.add(as_items(block))
            if not block or self._items.end >= self._most:
                self._drawing = None
            self._state_after_draw = self._state.changes()
        return self._items.end

    def indices_at(self, positions: Positions) -> list[Any]:
        """Return the items at rising `positions`; in blocks, items before them are dropped."""
        if not self.is_sized and len(positions):
            self._items.drop(int(positions[0]))
        return self._items.at(positions)

    def close(self) -> None:
        """Warn once of a sampler changed within the epoch, which plain PyTorch would draw from."""
        if not self._has_warned and self.changed_in_pass() is not None and self.is_sized:
            self._has_warned = True
            log.warning(
                "training changes %s during its epoch. Each epoch is drawn as a whole at its start, so changes take "
                "effect with the next one.",
                self._what,
            )
        self._is_under_way = False

    def changed_in_pass(self) -> str | None:
        """Return text if training changed the sampler since the epoch's last draw, else None."""
        after = self._state_after_draw
        return None if after is None or not differences(after, self._state.changes()) else self._what

    def digest(self) -> str:
        """Return a digest of the current epoch's items, in blocks of the first ones."""
        if self.is_sized:
            return digest_of_items(self._items.kept)
        self.count_to(_COMPARED)
        return digest_of_items(self._items.head[:_COMPARED])

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, and the items of the current epoch."""
        base_seed = self._base_seed.state_dict()
        if not self.is_sized:
            state = {"begin": self._state_at_start} if self._is_under_way else {"now": self._changes()}
            return {**state, "base_seed": base_seed}
        packed = pack_items(self._items.kept) if self._expected is None else None
        if packed is None:
            packed = {"begin": self._state_at_start, "digest": self._expected or digest_of_items(self._items.kept)}
        return {"now": self._changes(), "items": packed, "base_seed": base_seed}

    def _changes(self) -> dict[str, Any]:
        """Return the state of the sampler: the one that was loaded, if nothing has changed since."""
        now = self._state.changes()
        return now if self._given is None or differences(self._given[1], now) else self._given[0]

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore state and items."""
        packed = state_dict.get("items", {})
        self._expected = packed.get("digest")
        if "digest" in packed:
            self._state_at_start = packed["begin"]
        elif packed:
            self._items.begin(unpack_items(packed))
        self._is_under_way = "begin" in state_dict
        if self._is_under_way:
            self._state_at_start = state_dict["begin"]
        state = state_dict["begin" if self._is_under_way else "now"]
        self._restore(self._state.restore, state, self._sampler)
        # A sampler that was not run before has none before the first epoch.
        self._has_position = self._is_given_at_end or any(path.endswith("/") for path in state)
        self._given = (state, self._state.changes()) if self._is_position else None
        self._base_seed.load_state_dict(state_dict["base_seed"])

    def clone(self) -> "SamplerOrder":
        """Return this order with a copy of its sampler, in the state in which it was built."""
        clone = copy.copy(self)
        clone._sampler = _copy_of(self._sampler, self._dataset)
        clone._state = self._state.for_copy(clone._sampler)
        clone._base_seed, clone._items = copy.copy(self._base_seed), copy.copy(self._items)
        clone._drawing = None
        return clone

    def _run(self, sampler: Any, epoch: int) -> Items | None:
        """Return the items of an epoch, as many as it needs; None if they are too many to hold."""
        blocks, count, size = list[Items](), 0, 0
        with self.seeded(epoch, 0):
            iterator = self.iterate(sampler, epoch)
            while count < self._most and size <= self._largest:
                block = [*map(_kept, islice(iterator, min(BLOCK, self._most - count)))]
                if not block:
                    break
                blocks.append(as_items(block))
                count, size = count + len(block), size + sum(map(_indices_in, block))
        return None if size > self._largest else joined(blocks)

    def _whole(self, items: Items | None, epoch: int) -> Items:
        if items is None:
            raise NotExact(
                f"{self._what} has ended its first epoch, and gives more than {self._largest} indices in epoch {epoch}:"
                " it does not end. Let it end after an epoch's worth of items, or set limit_train_batches."
            )
        return items

    def iterate(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """Return an iterator over `sampler` or a copy of it for `epoch`, in a block of `seeded`."""
        for one in samplers_in(sampler):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        # islice calls iter() again, on which a sampler that is its own iterator may start over.
        return map(next, repeat(self._base_seed.iterate(sampler, epoch)))

    @contextmanager
    def seeded(self, epoch: int, block: int) -> Iterator[None]:
        """Seed the main generators for a block of `epoch`; errors count as the user's code's."""
        seed = mix(self._key, epoch)
        try:
            with seeded_rng(mix(seed, block) if block else seed):
                yield
        except Exception as error:
            if isinstance(error, EngineError) or is_retryable(error):
                raise
            raise UserCodeError.of(f"{self._what}, epoch {epoch}", error) from error

    def _restore(self, restore: Callable[[Any], None], state: Any, sampler: Any) -> None:
        """Call `restore` with `state`, after starting a sampler that makes generators late.

        Raises:
            NotExact: an object or a generator of the state does not exist in the sampler.
        """
        try:
            restore(state)
        except NotExact:
            with self.seeded(0, 0):
                next(iter(sampler), None)
            restore(state)

    def _read_rest(self, sampler: Any) -> Items:
        """Read an epoch to its end from a sampler with a position; return its first items."""
        with self.seeded(0, 0):
            iterator = map(next, repeat(iter(sampler)))
            first = [*map(_kept, islice(iterator, BLOCK))]
            deque(islice(iterator, self._largest), maxlen=0)
        return as_items(first)

    def _dry_run(self) -> str:
        """Run copies of the sampler for two epochs, also restored ones; digest the first epoch."""
        built = self._state.full()
        one, other, resumed = (_copy_of(self._sampler, self._dataset) for _ in range(3))
        first = self._run(one, 0)
        self.is_sized = first is not None
        if first is None:
            self.endless = None if _says_more(self._sampler, self._largest) else self._what
            one = _copy_of(self._sampler, self._dataset)
        epochs = [self._first_items(one, 0) if first is None else first]
        if not len(epochs[0]):
            raise self._no_item()
        ended = SamplerState(one, self._dataset)
        between, graph = ended.full(), ended.graph_state()
        epochs.append(self._trial_run(one, 1))
        # Copies may share generators, and objects that cannot be copied.
        SamplerState(other, self._dataset).restore_full(built)
        if not self._are_equal(epochs[0], self._trial_run(other, 0)):
            self._is_given_at_end = self._ends_before(built, epochs[0])
            if not self._is_given_at_end:
                raise self._other_order()
        self._resume_copy(resumed, between, graph)
        if not self._are_equal(epochs[1], self._trial_run(resumed, 1)):
            self._is_position = any(path.endswith("/") for path in between)
            resumed = _copy_of(self._sampler, self._dataset)
            if not self._is_position or not self._resumes_position(resumed, between, graph, *epochs):
                raise self._other_order()
        self._state.restore_full(built)
        if self._is_given_at_end:
            self._read_rest(self._sampler)
        self._begin(epochs[0] if self.is_sized else None)
        return digest_of_items(epochs[0])

    def _trial_run(self, sampler: Any, epoch: int) -> Items:
        """Return the items of an epoch, or the first ones if the first epoch is drawn in blocks."""
        if not self.is_sized:
            return self._first_items(sampler, epoch)
        return self._whole(self._run(sampler, epoch), epoch)

    def _first_items(self, sampler: Any, epoch: int) -> Items:
        drawing = _Drawing(self, sampler, epoch)
        return as_items(drawing.next_block(min(BLOCK, self._most)))

    @staticmethod
    def _are_equal(items: Items, again: Items) -> bool:
        return digest_of_items(items) == digest_of_items(again)

    def _ends_before(self, built: Any, first: Items) -> bool:
        """Return whether the sampler, given its state again, gives nothing and then `first`."""
        sampler = _copy_of(self._sampler, self._dataset)
        SamplerState(sampler, self._dataset).restore_full(built)
        return not len(self._read_rest(sampler)) and self._are_equal(first, self._trial_run(sampler, 0))

    def _resume_copy(self, sampler: Any, state: Any, graph: Any) -> None:
        """Give a copy of the sampler the state at the end of an epoch."""
        copied = SamplerState(sampler, self._dataset)
        try:
            self._restore(copied.restore_full, state, sampler)
            copied.restore_graph_state(graph)
        except NotExact as error:
            raise NotExact(f"{self._what} cannot load its own state: {error}. {_WAY_OUT}") from error
        except Exception as error:
            raise UserCodeError.of(f"{self._what}, loading its own state", error) from error

    def _resumes_position(self, sampler: Any, state: Any, graph: Any, first: Items, second: Items) -> bool:
        """Return whether the sampler's state after `first` is a position, resumed with the rest."""
        self._resume_copy(sampler, state, graph)
        rest = self._read_rest(sampler)
        is_whole = self.is_sized and len(first) < self._most  # then nothing is left of it
        if len(rest) and (is_whole or self._are_equal(rest[: len(first)], first[: len(rest)])):
            return False  # it starts the epoch over
        return self._are_equal(second, self._trial_run(sampler, 1))

    def _no_item(self) -> EngineError:
        if _running_generator(self._sampler):  # which has ended, as all copies share it
            return self._other_order()
        return UserError(f"{self._what} yields nothing: there is nothing to read.")

    def _other_order(self) -> NotExact:
        if (name := _running_generator(self._sampler)) is None:
            return NotExact(_OTHER_ORDER.format(what=self._what))
        return NotExact(
            f"{self._what} holds a running generator, {name}, which cannot be restored. Call the generator function in "
            "__iter__ instead, and draw from random generators that are attributes."
        )


class _Drawing:
    """An epoch of a sampler that is drawn in blocks.

    Args:
        order: order of the sampler.
        sampler: the sampler, or a copy of it.
        epoch: the epoch.
    """

    def __init__(self, order: SamplerOrder, sampler: Any, epoch: int) -> None:
        self._order, self._sampler, self._epoch = order, sampler, epoch
        self._iterator: Iterator[Any] | None = None
        self._blocks = 0

    def next_block(self, most: int) -> list[Any]:
        """Return the next items: at most `most`, and about `BLOCK` indices; none at the end."""
        items, size = list[Any](), 0
        with self._order.seeded(self._epoch, self._blocks):
            if self._iterator is None:
                self._iterator = self._order.iterate(self._sampler, self._epoch)
            for item in islice(self._iterator, most):
                items.append(_kept(item))
                size += _indices_in(item)
                if size >= BLOCK:
                    break
        self._blocks += 1
        return items


def _kept(item: Any) -> Any:
    """Return `item`; a copy of a list, which the sampler may fill again for the next one."""
    return copy.copy(item) if type(item) is list else item


def _indices_in(item: Any) -> int:
    return len(item) if type(item) is list else 1


def _largest_epoch(sampler: Any, dataset: Any) -> int:
    """Return the largest number of indices in an epoch held whole, rather than in blocks."""
    samples = len(dataset) if hasattr(dataset, "__len__") else 0
    known = 0
    if type(sampler) in _SIZED or all(module_of(type(one)).startswith("torch.") for one in samplers_in(sampler)):
        known = len(sampler) * getattr(sampler, "batch_size", 1)
    return max(known, 2 * samples, min(16 * samples, 4_000_000)) + 100_000


def _says_more(sampler: Any, items: int) -> bool:
    """Return whether a sampler has a length above `items`."""
    try:
        return len(sampler) > items
    except Exception:  # no length, or one that reading an endless sampler would tell
        return False


def _is_lazy(sampler: Any) -> bool:
    """Return whether `sampler` may draw items one by one, as they are read."""
    iterate = type(sampler).__iter__
    return isgeneratorfunction(iterate) and iterate.__module__.partition(".")[0] != "torch"


def _running_generator(sampler: Any) -> str | None:
    """Return the name of a Python generator that `sampler` is, or holds as attribute; or None."""
    if isinstance(sampler, GeneratorType):
        return sampler.__name__
    held = ((name, value) for one in samplers_in(sampler) for name, value in own_dict(one).items())
    return next((name for name, value in held if isinstance(value, GeneratorType)), None)


def _copy_of(sampler: Any, dataset: Any) -> Any:
    """Return a copy of `sampler` over the same data; itself if it cannot be copied."""
    try:
        return copy.deepcopy(sampler, {id(dataset): dataset})
    except Exception:
        return sampler


class BaseSeed:
    """Iterates over a sampler as `DataLoader.__iter__`, which first draws a worker seed.

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
        """Return whether the generator was drawn from; {} unless the sampler shares it."""
        return {} if self._path is None else {"is_drawn_once": self._is_drawn_once}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Continue to draw as the loader did whose state it is."""
        self._is_drawn_once = state_dict.get("is_drawn_once", self._is_drawn_once)
