"""Loaders of any other kind (libraries, generators, lists), read in the main process.

A pass is `iter(loader)`. A run resumes inside a pass by the loader's own state if it has one that passes the test of
streams, else by reading the pass again: from the attributes and generators of the loader at its start, and with the
same random numbers. A loader that continues one iterator over its passes is read again from the first pass on.
"""

import copy
import logging
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine.code_origin import is_user_class
from midstride.engine.data.data_owners import DataOwners, Nodes
from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.iterable.schedule import PassPosition, ShardBatch
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.data.sampler_state import samplers_in
from midstride.engine.data.worker_data import loader_attributes
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.generator_search import find_generators
from midstride.engine.objects.kinds.generators import Generator, get_state, set_state
from midstride.engine.state.stateful import Stateful

__all__ = ["Batches", "WholeLoader", "is_loader", "is_read_whole"]

log = logging.getLogger(__name__)

_END = object()
_FACTORIES = (types.FunctionType, types.MethodType, partial)
#: iterables that are data, not loaders
_DATA = (str, bytes, bytearray, Mapping, Sequence, set, frozenset, Tensor, np.ndarray, type)


def is_read_whole(loader: object) -> bool:
    """Return whether the engine cannot order the batches of `loader`: a subclass, another kind."""
    if not isinstance(loader, DataLoader):
        return True
    return any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))


def is_loader(value: object) -> bool:
    """Return whether `value`, no container, is an iterable or makes an iterator.

    >>> is_loader(iter([1])), is_loader(Tensor([1.0]))
    (True, False)
    """
    if isinstance(value, (*_DATA, Dataset)):
        return isinstance(value, range)
    return isinstance(value, DataLoader) or hasattr(type(value), "__iter__") or _is_factory(value)


def _is_factory(value: object) -> bool:
    return isinstance(value, _FACTORIES) and not hasattr(value, "train_dataloader")


class Batches:
    """A list of batches as a loader."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class LoaderStream(IterableDataset[Any]):
    """A loader as an iterable data set, whose samples are its batches.

    Args:
        loader: the loader, or a function that returns an iterator.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        #: restores the state of the loader at the start of the pass; None if it has that state
        self.rewind: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Return the number of batches of a pass, according to the loader."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.prepare()
        batches = iter(self.loader() if _is_factory(self.loader) else self.loader)
        # The iterator of a loader whose state is not used has the same state.
        hides_state = isinstance(self.loader, Stateful) and not isinstance(self, Stateful)
        return (batch for batch in batches) if hides_state else batches

    def prepare(self) -> None:
        """Restore the state of the loader at the start of the pass, if it has another one."""
        if self.rewind is not None:
            self.rewind()

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the loader, its data set and its samplers."""
        samplers = (getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))
        owners = [self.loader, getattr(self.loader, "dataset", None)]
        owners += [one for sampler in samplers for one in samplers_in(sampler)]
        for owner in {id(owner): owner for owner in owners}.values():
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)

    def not_copied(self) -> list[object]:
        """Return objects that a copy of this stream can share, as reading does not change them."""
        dataset = getattr(self.loader, "dataset", None)
        return [dataset] if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset) else []


class StatefulLoaderStream(LoaderStream):
    """The same for a loader with `state_dict` and `load_state_dict`."""

    #: state of the loader at the end of the pass before, which another process read; None without one
    ended: Any = None

    def prepare(self) -> None:
        """Restore the loader at the pass's start, and its own state of the end of the last one."""
        super().prepare()
        if self.ended is None:
            return
        with RngIsolation():
            self.loader.load_state_dict(self.ended)
            has_ended = next(iter(self.loader), _END) is _END
        if not has_ended:  # that state resumes with the next pass
            self.loader.load_state_dict(self.ended)

    def state_dict(self) -> Any:
        """Return the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the loader's state, on top of its state at the start of the pass."""
        super().prepare()
        self.rewind = self.ended = None
        self.loader.load_state_dict(state_dict)


class _LoaderState(DataOwners):
    """The attributes and generators of a loader between two passes.

    Args:
        loader: the loader; its own attributes are its state if its class is the user's.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__({"loader": loader} if is_user_class(type(loader)) else {})
        self._loader = loader

    def owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return the loader with its attributes; of a DataLoader, those that the user has set."""
        own = loader_attributes if isinstance(self._loader, DataLoader) else attributes_of
        return {path: (owner, own(owner)) for path, owner in self._given.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return attributes as nodes, and the states of generators."""
        states = {path: get_state(generator) for path, generator in self._generators().items()}
        return {"nodes": self.nodes(), "generators": states}

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        nodes: Nodes = state["nodes"]
        self.restore(nodes)
        generators = self._generators()
        for path, saved in state["generators"].items():
            if path in generators:
                set_state(generators[path], saved)

    def _generators(self) -> dict[str, Any]:
        found = find_generators(self._loader)
        return {path: generator for path, generator in found.items() if isinstance(generator, Generator)}


class WholeLoader(IterableLoader):
    """A loader of any kind that is read as a whole.

    Args:
        loader: the loader, or a function that returns an iterator over the batches of a pass.
        name: name of the loader in messages.
        options: as for `IterableLoader`.
    """

    def __init__(self, loader: Any, *, name: str, **options: Any) -> None:
        has_state = isinstance(loader, Stateful) and not _draws_beside_state(loader)
        stream = (StatefulLoaderStream if has_state else LoaderStream)(loader)
        super().__init__(DataLoader(stream, batch_size=None), name=name, **options)
        self.source = None  # the loader's state is kept here
        self._stream, self._loader_state = stream, _LoaderState(loader)
        self._reader.read_whole(self.name)
        self._before: dict[str, Any] | None = None  #: state of the loader at the start of the pass
        self._is_continued = not has_state and (_holds_iterator(loader) or _keeps_workers(loader))
        #: epoch, number of batches, and whether the end was seen, of the current pass
        self._pass: tuple[int, int, bool] | None = None
        #: the same of each pass before it, for a loader that continues one iterator
        self._history: list[tuple[int, int, bool]] = []
        self._is_over = False  #: whether the next batch is of another pass
        self._is_behind = False  #: whether another process read the passes of the history

    @staticmethod
    def _full_name(name: str, dataset: Any) -> str:
        """Return the name of the loader in messages, with its type."""
        return name if _is_factory(dataset.loader) else f"{name} (a {type(dataset.loader).__name__})"

    def changed_in_pass(self) -> str | None:
        """Return text if the loader uses the trained module; else a resume starts from a state."""
        return None if self.had_states else self._module_warning

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the loader's state at the start of this pass or the next."""
        return {**super().state_dict(), "before": self._before_next(), "history": [[*one] for one in self._past()]}

    def _before_next(self) -> dict[str, Any]:
        if self._before is not None and not self._is_over:
            return self._before
        if self._is_continued:
            return {}
        state, current = self._loader_state.state_dict(), self._pass
        stream = self._stream
        if current is None or not current[2] or not isinstance(stream, StatefulLoaderStream):
            return state
        # With generators of its own, a new pass starts from their states.
        return state if state["generators"] else {**state, "ended": stream.state_dict()}

    def _past(self) -> list[tuple[int, int, bool]]:
        """Return the passes before the next batch, for a loader with one iterator over passes."""
        ended = [self._pass] if self._is_continued and self._is_over and self._pass is not None else []
        return [*self._history, *ended]

    def set_at_end(self, at_end: bool) -> None:
        """Set whether the last batch of the epoch was returned; else the next is another pass's."""
        super().set_at_end(at_end)
        self._is_over |= self._pass is not None and not at_end

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of `epoch` from batch `start` on.

        With `start` > 0, resume from the loaded state.
        """
        for batch in super().batches(epoch, start):
            self._is_over = self.at_end
            yield batch

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state."""
        super().load_state_dict(state_dict)
        self._before, self._pass, self._is_over = state_dict["before"], None, False
        self._history = [(epoch, batches, ended) for epoch, batches, ended in state_dict["history"]]
        self._is_behind = bool(self._history)

    def _read(self, epoch: int, position: PassPosition, *, resumed: bool) -> Iterator[ShardBatch]:
        if self._is_behind:
            self._read_history()
        elif not resumed and self._pass is not None:
            self._is_over = True
            self._history = self._past()
            self._warn_of_history()
        stream, loaded = self._stream, self._before if self._pass is None else None
        stream.rewind = partial(self._loader_state.put_back, loaded) if loaded else None
        if isinstance(stream, StatefulLoaderStream):
            stream.ended = (loaded or {}).get("ended")
        if not loaded:
            self._before = {} if self._is_continued else copy.deepcopy(self._loader_state.state_dict())
        number = sum(position.read)
        self._pass, self._is_over = (epoch, number, False), False
        for batch in super()._read(epoch, position, resumed=resumed):
            number += 1
            self._pass = epoch, number, False
            yield batch
        self._pass = epoch, number, True

    def _warn_of_history(self) -> None:
        """Warn once that a resumed run reads all passes again."""
        if self._is_continued and len(self._history) == 1:
            log.warning(
                "%s continues one iterator over its epochs: a resumed run reads all batches of the run again. Return "
                "torch's DataLoader, also with persistent_workers=True (timm: use_multi_epochs_loader=False), or a "
                "function that returns an iterator over the batches of one epoch",
                self.name,
            )

    def _read_history(self) -> None:
        """Read again what an iterator that is kept over passes gave in another process."""
        self._is_behind = False
        began_s, batches = time.monotonic(), sum(number for _, number, _ in self._history)
        log.info("reading %d batches of %s again, which continues one iterator over its epochs", batches, self.name)
        with self._rng_isolation:
            for epoch, number, ended in self._history:
                self._reader.read_again(epoch, number, to_end=ended)
        log.info("read %d batches of %s again in %.1f s", batches, self.name, time.monotonic() - began_s)


def _draws_beside_state(loader: Any) -> bool:
    """Return whether passes depend on draws that the state of a torchdata loader leaves out.

    It draws a seed for its workers from `generator`, and an order more in its first pass with persistent workers.
    """
    return isinstance(loader, DataLoader) and (loader.generator is not None or _keeps_workers(loader))


def _keeps_workers(loader: Any) -> bool:
    """Return whether a loader with a state keeps its workers, and with them an iterator."""
    return isinstance(loader, DataLoader) and isinstance(loader, Stateful) and loader.persistent_workers


def _holds_iterator(loader: Any) -> bool:
    """Return whether a loader is an iterator, or it or a loader in it keeps one over its passes."""
    own = vars(loader).items() if hasattr(loader, "__dict__") else ()
    kept = [loader, *(value for name, value in own if name != "_iterator")]  # torch's own, with persistent workers
    inner = [one for one in kept[1:] if isinstance(one, DataLoader) and is_read_whole(one)]
    return any(hasattr(type(one), "__next__") for one in kept) or any(map(_holds_iterator, inner))
