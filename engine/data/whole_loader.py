"""Loaders of any other kind (libraries, generators, lists), read in the main process.

A pass is `iter(loader)`. A run resumes inside a pass by the loader's own state if it has one that passes the test of
streams, else by reading the pass again: from the attributes and generators of the loader at its start, and with the
same random numbers. A loader that continues one iterator over its passes is read again from the first pass on. Workers
of a DataLoader in it end with the pass, also persistent ones.
"""

import copy
import logging
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine.code_origin import is_user_class
from midstride.engine.data.accelerate_internals import is_prepared
from midstride.engine.data.data_owners import DataOwners, Nodes, differing_attributes
from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.iterable.schedule import PassPosition, ShardBatch
from midstride.engine.data.iterable.trial import Trial
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.data.sampler_state import samplers_in
from midstride.engine.data.torch_internals import end_kept_pass, is_loader_pass
from midstride.engine.data.worker_data import loader_attributes
from midstride.engine.errors import NotExact
from midstride.engine.formatting import format_names
from midstride.engine.objects.attributes import attributes_of, set_attribute
from midstride.engine.objects.generator_search import find_generators, held_objects, held_of, is_inside
from midstride.engine.objects.kinds.generators import Generator, get_state, set_state
from midstride.engine.state.differences import differences
from midstride.engine.state.object_nodes import Instance
from midstride.engine.state.stateful import Stateful

__all__ = ["Batches", "WholeLoader", "is_loader", "is_read_whole"]

log = logging.getLogger(__name__)

_END = object()
#: types of attributes that count passes
_COUNTERS = (bool, int, float, str)
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

    An iterable data set is a loader of what it yields, as webdataset's WebLoader is.

    >>> is_loader(iter([1])), is_loader(Tensor([1.0]))
    (True, False)
    """
    if isinstance(value, (*_DATA, Dataset)) and not isinstance(value, IterableDataset):
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

    def contents(self) -> Nodes:
        """Return the attributes of the user's objects in the loader, to compare copies of it."""
        return _LoaderState(self.loader).nodes()

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
        super().prepare()  # attributes that its own state leaves out, such as a count of passes
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


class _Pass(NamedTuple):
    epoch: int
    batches: int
    has_ended: bool
    digest: int


class _LoaderState(DataOwners):
    """The attributes and generators of a loader between two passes.

    Args:
        loader: the loader; its state are the attributes of the user's objects that it holds, itself included.
    """

    def __init__(self, loader: Any) -> None:
        own = {"loader": loader} if is_user_class(type(loader)) else {}
        super().__init__({**_users_objects(loader), **own})
        self._loader = loader
        self._built = self._counters()

    def owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return objects with their attributes; of a DataLoader, those that the user has set."""
        return {
            path: (owner, loader_attributes(owner) if isinstance(owner, DataLoader) else attributes_of(owner))
            for path, owner in self._given.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return attributes as nodes, the states of generators, and changed counters."""
        states = {path: get_state(generator) for path, generator in self._generators().items()}
        built, now = self._built, self._counters()
        counters = {path: changed for path, own in now.items() if (changed := _changed(built.get(path, {}), own))}
        return {"nodes": self.nodes(), "generators": states, "counters": counters}

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        nodes: Nodes = state["nodes"]
        self.restore(nodes)
        generators = self._generators()
        for path, saved in state["generators"].items():
            if path in generators:
                set_state(generators[path], saved)
        held = held_objects(self._loader)
        for path, counters in state["counters"].items():
            for name, value in counters.items() if path in held else ():
                set_attribute(held[path], name, value)

    def amend(self, wanted: Nodes, trial: Trial | None, name: str) -> None:
        """Restore attributes to `wanted` where the own state of the loader `name` has left them out.

        Args:
            wanted: result of `nodes` in another attempt.
            trial: trial of the loader, which tells the attributes that its own state restores to other values.
            name: name of the loader.
        """
        local = None if trial is None else trial.local
        now = self.nodes()
        changed = differing_attributes(wanted, now) - (local or set())
        if changed and local is None:
            log.warning(
                "%s: %s differ from the run's before it stopped, and are not restored, since the loader was not "
                "tested. Put attributes that training changes into its state_dict",
                name,
                format_names(sorted(name for _, name in changed), 3),
            )
        elif changed:
            kept = {path: {n: node for n, node in own.items() if (path, n) not in changed} for path, own in now.items()}
            for path, name in changed:
                if name in wanted[path]:
                    kept[path][name] = wanted[path][name]
            self.restore(kept)

    def _counters(self) -> dict[str, dict[str, Any]]:
        """Return plain attributes of libraries' objects, such as counts of passes, by path.

        Those of a pass of torch's loader, such as the numbers of its processes, are left out.
        """
        held = held_objects(self._loader)
        passes = [path for path, owner in held.items() if is_loader_pass(owner)]
        return {
            path: {name: value for name, value in attributes_of(owner).items() if type(value) in _COUNTERS}
            for path, owner in held.items()
            if not (isinstance(owner, nn.Module) or is_user_class(type(owner)) or is_inside(path, passes))
        }

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
        has_state = isinstance(loader, Stateful) and not (is_prepared(loader) or _draws_beside_state(loader))
        stream = (StatefulLoaderStream if has_state else LoaderStream)(loader)
        super().__init__(DataLoader(stream, batch_size=None), name=name, **options)
        self.source = None  # the loader's state is kept here
        self._stream, self._loader_state = stream, _LoaderState(loader)
        self._reader.read_whole(self.name, is_tried=has_state or isinstance(loader, IterableDataset))
        self._before: dict[str, Any] | None = None  #: state of the loader at the start of the pass
        self._now: dict[str, Any] = {}  #: loaded state of the loader after its last batch, which training may change
        #: number of batches and digest of all samples that were read before the loaded state was taken
        self._ahead: tuple[int, int] | None = None
        #: whether passes continue one iterator; None until the second pass shows it
        self._continues: bool | None = False if has_state else (bool(self._kept()) or None)
        #: epoch, number of batches, whether the end was seen, and digest of the samples, of the current pass
        self._pass: _Pass | None = None
        #: the same of each pass before it, for a loader that continues one iterator
        self._history: list[_Pass] = []
        self._has_warned_of_history = False
        self._is_over = False  #: whether the next batch is of another pass
        self._is_behind = False  #: whether another process read the passes of the history

    @staticmethod
    def _full_name(name: str, dataset: Any) -> str:
        """Return the name of the loader in messages, with its type."""
        return name if _is_factory(dataset.loader) else f"{name} (a {type(dataset.loader).__name__})"

    def _kept(self) -> list[Any]:
        """Return the iterators that the loader holds now."""
        return _iterators_in(self._stream.loader)

    @property
    def _is_continued(self) -> bool:
        """Whether the next pass continues an iterator, or can."""
        return bool(self._kept()) if self._continues is None else self._continues

    def changed_in_pass(self) -> str | None:
        """Return text if the loader uses the trained module; else a resume starts from a state."""
        return None if self.had_states else self._module_warning

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the loader's state at the start of this pass or the next."""
        before, now, ahead = self._before_next(), self._now, self._ahead
        if (current := self._pass) is not None:
            is_within = before is self._before
            now = copy.deepcopy(self._loader_state.state_dict()) if is_within or self._is_continued else {}
            ahead = (current.batches, current.digest) if is_within else None
        history, now = [[*one] for one in self._past()], _changes_since(before, now)
        return {**super().state_dict(), "before": before, "now": now, "ahead": ahead and [*ahead], "history": history}

    def _before_next(self) -> dict[str, Any]:
        if self._before is not None and not self._is_over:
            return self._before
        if self._is_continued:
            return {}
        state, current = self._loader_state.state_dict(), self._pass
        stream = self._stream
        if current is None or not current.has_ended or not isinstance(stream, StatefulLoaderStream):
            return state
        # With generators of its own, a new pass starts from their states.
        return state if state["generators"] else {**state, "ended": stream.state_dict()}

    def _past(self) -> list[_Pass]:
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
        self._before = state_dict["before"]
        self._now = _with_changes(state_dict["before"], state_dict["now"])
        self._ahead = state_dict["ahead"] and (*state_dict["ahead"],)
        self._pass, self._is_over = None, False
        self._history = [_Pass(*one) for one in state_dict["history"]]
        self._is_behind = bool(self._history)

    def close(self) -> None:
        """End all workers, also persistent ones in the loader."""
        super().close()
        if not self._is_continued:
            _end_kept_passes(self._stream.loader)

    def _read(self, epoch: int, position: PassPosition, *, resumed: bool) -> Iterator[ShardBatch]:
        if was_behind := self._is_behind:
            self._read_history()
        elif not resumed and self._pass is not None:
            self._is_over = True
            self._history = self._past()
        loaded = self._before if self._pass is None else None
        # Reading earlier passes again has brought the loader to the start of this one.
        self._set_start(loaded or {}, rewinds=not was_behind)
        if not self._is_continued:
            _end_kept_passes(self._stream.loader)
        if not loaded:
            self._before = {} if self._continues else copy.deepcopy(self._loader_state.state_dict())
        if not resumed:
            self._restore_changes()
        number, kept = sum(position.read), self._kept()
        self._pass, self._is_over = _Pass(epoch, number, False, position.digests[0]), False
        for batch in super()._read(epoch, position, resumed=resumed):
            if kept or self._continues:
                self._compare_kept(kept)
                kept = []
            number += 1
            self._pass = _Pass(epoch, number, False, batch.answer.digest)
            self._compare_ahead()
            self._restore_changes()
            yield batch
        self._pass = self._pass._replace(has_ended=True)

    def _set_start(self, loaded: dict[str, Any], *, rewinds: bool) -> None:
        """Set the loaded state of the loader that the next pass starts from, if there is one."""
        stream = self._stream
        stream.rewind = partial(self._loader_state.put_back, loaded) if loaded and rewinds else None
        if isinstance(stream, StatefulLoaderStream):
            stream.ended = loaded.get("ended")

    def _compare_ahead(self) -> None:
        """Compare the batch read ahead of a snapshot with the one of the earlier attempt.

        Raises:
            NotExact: a resume gives another batch.
        """
        ahead, self._ahead = self._ahead, None
        current = self._pass
        if ahead is None or current is None or ahead == (current.batches, current.digest):
            return
        trial = self._reader.trial
        differing = differing_attributes(self._now["nodes"], self._loader_state.nodes())
        names = sorted(name for _, name in differing - ((trial and trial.local) or set()))
        changed = f" ({format_names(names, 3)})" if names else ""
        raise NotExact(
            f"{self.name} gives another batch {current.batches - 1} in epoch {current.epoch} than before the run "
            f"stopped: training has changed the loader within the epoch{changed}. Change it between epochs, or start "
            "over under another run name."
        )

    def _restore_changes(self) -> None:
        """Restore what training has changed in the loader, after the batch read ahead of a snapshot."""
        now, self._now = self._now, {}
        if now and self.had_states:
            self._loader_state.amend(now["nodes"], self._reader.trial, self.name)
        elif now and differences(now, self._loader_state.state_dict()):
            self._loader_state.put_back(now)

    def _compare_kept(self, kept: Sequence[Any]) -> None:
        """Find out whether a later pass continues an iterator, and warn once if so."""
        if self._continues is None:
            self._continues = any(one is other for one in kept for other in self._kept())
            self._history = self._history if self._continues else []
        if self._continues and len(self._history) == 1 and not self._has_warned_of_history:
            self._has_warned_of_history = True
            log.warning(
                "%s continues one iterator over its epochs: a resumed run reads all batches of the run again. Return "
                "torch's DataLoader, also with persistent_workers=True (timm: use_multi_epochs_loader=False), or a "
                "function that returns an iterator over the batches of one epoch",
                self.name,
            )

    def _read_history(self) -> None:
        """Read again the batches that a kept iterator returned in another process."""
        self._is_behind = False
        began_s, batches = time.monotonic(), sum(one.batches for one in self._history)
        log.info("reading %d batches of %s again, which continues one iterator over its epochs", batches, self.name)
        with self._rng_isolation:
            for epoch, number, ended, digest in self._history:
                if self._reader.read_again(epoch, number, to_end=ended) != digest:
                    raise NotExact(
                        f"{self.name} gives other samples in epoch {epoch} than before the run stopped: training has "
                        "changed the loader, or its data have changed. Return an iterator for each epoch, or start "
                        "over under another run name."
                    )
        log.info("read %d batches of %s again in %.1f s", batches, self.name, time.monotonic() - began_s)


def _changes_since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the state `now` with the values of only those attributes that differ from `before`.

    If one of them has tensors or arrays, so do all others with such: they may share memory.
    """
    if not (now and before):
        return now
    then: Nodes = before["nodes"]
    attributes = {(path, name): node for path, own in now["nodes"].items() for name, node in own.items()}
    written = differing_attributes(then, now["nodes"]) | {at for at in attributes if at[0] not in then}
    if any(_has_memory(attributes[at]) for at in written & attributes.keys()):
        written |= {at for at, node in attributes.items() if _has_memory(node)}
    nodes = {
        path: {"names": [*own], "values": {name: own[name] for name in own if (path, name) in written}}
        for path, own in now["nodes"].items()
    }
    return {**now, "nodes": nodes}


def _has_memory(node: object) -> bool:
    """Return whether a node has a tensor or array."""
    if isinstance(node, Instance):
        node = node.state
    if isinstance(node, Mapping):
        return any(map(_has_memory, node.values()))
    if isinstance(node, (list, tuple, deque)):
        return any(map(_has_memory, node))
    return isinstance(node, (Tensor, np.ndarray))


def _with_changes(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the state from a result of `_changes_since`."""
    if not (changes and before):
        return changes
    nodes = {
        path: {name: own["values"].get(name, before["nodes"].get(path, {}).get(name)) for name in own["names"]}
        for path, own in changes["nodes"].items()
    }
    return {**changes, "nodes": nodes}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _users_objects(loader: Any) -> dict[str, Any]:
    """Return the user's objects in `loader` by path, without modules and data modules."""
    held = {path: one for path, one in held_objects(loader).items() if path}
    beside = [path for path, one in held.items() if isinstance(one, nn.Module) or hasattr(one, "train_dataloader")]
    return {
        path.removeprefix("."): one
        for path, one in held.items()
        if is_user_class(type(one)) and not any(path.startswith(other) for other in beside)
    }


def _end_kept_passes(loader: Any) -> None:
    """End persistent workers in `loader`, whose random numbers and memory no later attempt has."""
    for one in held_of(loader, DataLoader).values():
        end_kept_pass(one)


def _draws_beside_state(loader: Any) -> bool:
    """Return whether passes depend on draws that the state of a torchdata loader leaves out.

    It draws a seed for its workers from `generator`, and an order more with persistent workers.
    """
    return isinstance(loader, DataLoader) and (loader.generator is not None or loader.persistent_workers)


def _iterators_in(loader: Any) -> list[Any]:
    """Return `loader` if it is an iterator, and the iterators that it, or a loader in it, keeps."""
    own = vars(loader).items() if hasattr(loader, "__dict__") else ()
    kept = [loader, *(value for name, value in own if name != "_iterator")]  # torch's own, with persistent workers
    inner = [one for one in kept[1:] if isinstance(one, DataLoader) and is_read_whole(one)]
    found = [one for one in kept if hasattr(type(one), "__next__")]
    return found + [iterator for one in inner for iterator in _iterators_in(one)]
