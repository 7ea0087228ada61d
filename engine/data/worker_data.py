"""The data of a loader as its workers have them, or copies that are read: as they were when a pass began.

What training changes of a data set, a loader or a collate_fn later, they do not see before they are made anew. Those of
a run that goes on inside an epoch are made of what those before them had.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine.data.data_owners import DataOwners, Nodes, WholeData, data_owners
from midstride.engine.data.pass_collate import collate_node, collate_of
from midstride.engine.data.quick_look import QuickLook
from midstride.engine.data.read_memory import ReadMemory
from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.plain_values import is_large
from midstride.engine.objects.roots import module_roots
from midstride.engine.objects.shared_memory import is_shared
from midstride.engine.state.differences import differences, same_key_order
from midstride.engine.state.nodes import Instance

__all__ = ["WorkerData", "loader_attributes"]

log = logging.getLogger(__name__)

_LOADER = "loader"
#: of a loader, what torch keeps in each and no user sets anew
_OF_LOADERS = frozenset(vars(DataLoader(TensorDataset(torch.empty(1))))) - {"collate_fn", "worker_init_fn"}


def loader_attributes(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader holds that users set, and may set anew."""
    return {name: value for name, value in attributes_of(loader).items() if name not in _OF_LOADERS}


class WorkerData(DataOwners):
    """What is copied when a pass begins; where its data are not, the functions that it goes on with.

    Args:
        loader: whose data they are.
        module: which data may hold, and other parts of the state keep.
        copies: that copies of the data are read; else they are read as they are, or there is nothing to be copied.
    """

    def __init__(self, loader: DataLoader[Any], module: nn.Module | None = None, *, copies: bool) -> None:
        self._data = dict(data_owners("data set", loader.dataset))
        super().__init__(self._data if copies else {}, module)
        self._loader, self._copies = loader, copies
        #: what the copies that are read were made of; None before the first
        self._start: Nodes | None = None
        #: whether that is a state's, which no pass has gone on with yet
        self._is_loaded = False
        #: whether a pass has begun, in this attempt or before
        self._has_begun = False
        #: functions may be replaced in training, and only those of the user's files are found by their names
        self._built = {name: vars(loader)[name] for name in ("collate_fn", "worker_init_fn")}
        #: what a pass began with, and a look at what stood there
        self._last: tuple[Nodes, QuickLook] | None = None
        #: what the workers of the pass that is under way share with this process, and what it held when that began
        self._shared: dict[str, object] = {}
        self._shared_lines: dict[str, str] = {}
        self._is_told = False

    def leave_data(self) -> None:
        """Leave the data as they are from here on, also at the end of a block of `as_begun`: they cannot be copied."""
        self._given, self._copies = {}, False

    def state_dict(self, collate: Any) -> dict[str, Any]:
        """Return whether a pass has begun, and of what, unless one that goes on would find the same.

        Args:
            collate: which makes the batches of the pass.
        """
        self._tell_shared()
        start = self._start
        if not self._is_loaded and start is not None:
            start = self._of_pass(start, collate)
        return {**({"begun": True} if self._has_begun else {}), **({} if start is None else {"start": start})}

    def _of_pass(self, start: Nodes, collate: Any) -> Nodes | None:
        """Return what a run that goes on in the pass begins it with; None if that is what stands there now."""
        if self._copies:
            return start if self._has_changed(start) else None
        if collate is self._loader.collate_fn:  # whatever it holds
            return None
        return {_LOADER: {"collate_fn": collate_node(collate, self._around_collate())}}

    def _has_changed(self, start: Nodes) -> bool:
        """Return whether what is copied now would be something else than `start`."""
        # A state may be taken at every step, and a walk takes as long as a small batch.
        if self._last is not None and self._last[0] is start and self._last[1].is_same(self.owners()):
            return False
        now = {path: nodes for path, nodes in self.nodes().items() if path in start}
        then = {path: start[path] for path in now}  # the number of workers may have changed, and with it the owners
        return bool(differences(then, now)) or not same_key_order(then, now)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it back."""
        self._start = state_dict.get("start")
        self._is_loaded, self._has_begun = self._start is not None, state_dict.get("begun", False)

    def restored(self) -> None:
        """Note what the data hold when a state is back: what workers that stay began with, unless it says other."""
        if self._has_begun and self._start is None and self._loader.persistent_workers:
            self._start = copy.deepcopy(self.nodes())

    @contextmanager
    def as_begun(self, *, goes_on: bool) -> Iterator[None]:
        """Give the data within the block what they held when the copies were made that a pass goes on with, in place.

        Args:
            goes_on: with copies made before; else, but for workers that stay, they are made of the data as they are.
        """
        start, self._is_loaded = self._start if goes_on or self._loader.persistent_workers else None, False
        self._has_begun = True
        with self._data_as(start) if self._copies else self._collate_as(start or {}):
            yield
        self._note_shared()

    @contextmanager
    def _data_as(self, start: Nodes | None) -> Iterator[None]:
        """Give the data within the block what `start` says, if anything."""
        now = copy.deepcopy(self.nodes())
        wanted = now if start is None else _completed(now, start)
        if start is None or not self._has_changed(wanted):
            self._start, self._last = wanted, (wanted, QuickLook(self.owners()))
            yield
            return
        with self.reverted():
            try:
                lost = self.fill(wanted)
            except Exception as error:
                raise NotExact(
                    "the snapshot says what the workers of a loader began with, and the data cannot take it: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if lost:
                log.warning(
                    "what the workers of a loader had here when the epoch began cannot be brought back, and they read "
                    "the rest of it with what there is: %s",
                    ", ".join(f"{path} (was {what})" for path, what in lost.items()),
                )
            self._start = wanted
            with self._collate_as(wanted) if not self._loader.num_workers else nullcontext():
                yield

    @contextmanager
    def _collate_as(self, start: Nodes) -> Iterator[None]:
        """Give the loader within the block the collate_fn that `start` says, if any: one that is apart from others."""
        node, before = start.get(_LOADER, {}).get("collate_fn", MISSING), self._loader.collate_fn
        known = [self._built["collate_fn"], before]
        made = MISSING if node is MISSING else collate_of(node, known, self._around_collate(), self._anchors())
        if made is not MISSING:
            vars(self._loader)["collate_fn"] = made
        try:
            yield
        finally:
            self._start = start
            vars(self._loader)["collate_fn"] = before

    def _around_collate(self) -> GraphWalk:
        """Return a walk over what the collate_fn of a pass may share: with the module, loader, data, and the next."""
        walk = self._walk()
        for root in () if self._module is None else module_roots(self._module):
            walk.root_attributes(root.values, root.path, is_small=False)
        loader = {name: value for name, value in loader_attributes(self._loader).items() if name != "collate_fn"}
        for path, own in {
            _LOADER: loader,
            **{path: attributes_of(owner) for path, owner in self._data.items()},
        }.items():
            walk.root_attributes(own, path, is_small=True)
        walk.node(self._loader.collate_fn, f"{_LOADER}/next collate_fn")
        return walk

    def end_pass(self) -> None:
        """Note that nothing is read any more: what changes from here on, the next pass begins with."""
        self._tell_shared()
        self._shared = {}

    def _note_shared(self) -> None:
        """Note what workers that have just been started share with this process; what is large is watched elsewhere."""
        if not self._loader.num_workers:
            return
        walk = self._walk()
        self._nodes(walk)
        self._shared = {path: one for path, one in walk.large.items() if is_shared(one) and not is_large(one)}
        self._shared_lines = _lines_of(self._shared)
        if self._shared and self._last is not None and self._last[0] is self._start:
            # Tensors that are pickled for workers have come to be shared by that.
            self._start = copy.deepcopy(self._nodes(self._walk()))
            self._last = (self._start, QuickLook(self.owners()))

    def _tell_shared(self) -> None:
        """Name, once, what has changed under workers that read ahead."""
        if not self._shared or self._is_told:
            return
        now = _lines_of(self._shared)
        changed = [path for path, line in now.items() if line != self._shared_lines.get(path)]
        self._is_told = bool(changed)
        if changed:
            log.warning(
                "%s has changed in memory that the workers of a loader share, while they read ahead: how fast they are "
                "decides which batch is the first that shows it, in each run anew. Change it between epochs, or read "
                "with num_workers=0",
                changed[0].replace("/", "."),
            )

    def left_out(self) -> dict[str, object]:
        """Return what of the data is large, or nothing that can be kept, by path: `as_begun` leaves it as it is."""
        walk = self._walk()
        self._nodes(walk)
        return walk.large | walk.deep | walk.opaque

    def collate_memory(self) -> ReadMemory:
        """Return what tells from here on whether the collate_fn holds something else."""
        memory = ReadMemory((), self._loader.collate_fn, self._module)
        memory.begin()
        return memory

    def owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return those whose attributes are copied, by path, with the attributes."""
        return {_LOADER: (self._loader, loader_attributes(self._loader)), **super().owners()}

    def filled(self, path: str, name: str, node: Any, live: Any) -> Any:
        """Return the function that the code has built the loader with, where `node` is of it; else what is there."""
        is_built = path == _LOADER and name in self._built and _is_of_kind(self._built[name], node)
        return self._built[name] if is_built else live

    def _anchors(self) -> dict[str, object]:
        data = {path: one.dataset if isinstance(one, WholeData) else one for path, one in self._data.items()}
        return super()._anchors() if self._copies else data | super()._anchors()

    def _walk(self) -> GraphWalk:
        is_copied = self._copies and self._loader.num_workers > 0
        return GraphWalk({id(value): name for name, value in self._anchors().items()}, {}, copied=is_copied)


def _lines_of(values: Mapping[str, object]) -> dict[str, str]:
    return {where: line for path, value in values.items() for where, line in digest_lines(path, value).items()}


def _completed(now: Nodes, start: Nodes) -> Nodes:
    """Return `start`, and of `now` what it does not say: a pass without workers has a collate_fn of its own alone."""
    is_whole = "worker_init_fn" in start.get(_LOADER, {})
    return start if is_whole else {**now, **start, _LOADER: {**now[_LOADER], **start.get(_LOADER, {})}}


def _is_of_kind(value: object, node: Any) -> bool:
    found = GraphWalk({}, {}).node(value, "")
    return isinstance(node, Instance) and isinstance(found, Instance) and found.kind == node.kind
