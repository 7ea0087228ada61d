"""Data of a loader at the start of a pass, as its workers or copies here have them.

Workers do not see later changes of data set, loader or collate_fn by training. If a run resumes within an epoch, its
workers are started with the data that the workers before them had.
"""

import copy
import logging
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine.data.attribute_fingerprint import AttributeFingerprint
from midstride.engine.data.data_owners import DataOwners, Nodes, WholeData, data_owners
from midstride.engine.data.read_side_effects import ReadSideEffects
from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.kinds.functions import code_digest
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.left_out import is_large, is_shared
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.roots import module_roots
from midstride.engine.objects.user_modules import function_called
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.differences import differences, same_key_order
from midstride.engine.state.module_index import ModuleIndex
from midstride.engine.state.object_nodes import Instance, kind_name, kind_text

__all__ = ["WorkerData", "loader_attributes"]

log = logging.getLogger(__name__)

_LOADER = "loader"
#: attributes that torch sets on every loader, other than functions that users may replace
_LOADER_ATTRIBUTES = frozenset(vars(DataLoader(TensorDataset(torch.empty(1))))) - {"collate_fn", "worker_init_fn"}


def loader_attributes(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the attributes of a loader that users have set, or may replace."""
    return {name: value for name, value in attributes_of(loader).items() if name not in _LOADER_ATTRIBUTES}


class WorkerData(DataOwners):
    """Data copied at the start of a pass; if none are copied, its collate_fn.

    Args:
        loader: loader of the data.
        module: module that data may refer to, whose state is saved elsewhere.
        copies: whether copies of the data are read, as in workers; else the data themselves are read.
    """

    def __init__(self, loader: DataLoader[Any], module: nn.Module | None = None, *, copies: bool) -> None:
        self._data = dict(data_owners("data set", loader.dataset))
        super().__init__(self._data if copies else {}, module)
        self._loader, self._copies = loader, copies
        #: nodes of the data at the start of the pass; None before the first pass
        self._start: Nodes | None = None
        #: whether `_start` was loaded, and no pass has resumed from it yet
        self._is_loaded = False
        #: whether a pass has begun, in this attempt or before
        self._has_begun = False
        #: functions at construction: they may be replaced in training, and those of libraries are not found by name
        self._built = {name: vars(loader)[name] for name in ("collate_fn", "worker_init_fn")}
        #: nodes at the start of a pass, and a fast check for changes since
        self._last: tuple[Nodes, AttributeFingerprint] | None = None
        #: path -> object that workers of the current pass share with this process, and its digests at the start
        self._shared: dict[str, object] = {}
        self._shared_lines: dict[str, str] = {}
        self._has_warned = False

    def stop_copying(self) -> None:
        """Stop copying and restoring data that cannot be copied, also after `data_of_pass`."""
        self._given, self._copies = {}, False

    def state_dict(self, collate: Any) -> dict[str, Any]:
        """Return whether a pass has begun, and its data if they have changed since.

        Args:
            collate: collate_fn of the pass.
        """
        self._warn_of_shared()
        start = self._start
        if not self._is_loaded and start is not None:
            start = self._pass_start(start, collate)
        return {**({"begun": True} if self._has_begun else {}), **({} if start is None else {"start": start})}

    def _pass_start(self, start: Nodes, collate: Any) -> Nodes | None:
        """Return the nodes that a resumed pass needs; None if they equal the present ones."""
        if self._copies:
            return start if self._has_changed(start) else None
        if collate is self._loader.collate_fn:  # its attributes are saved elsewhere
            return None
        return {_LOADER: {"collate_fn": collate_node(collate, self._collate_walk())}}

    def _has_changed(self, start: Nodes) -> bool:
        """Return whether the present data differ from `start`."""
        # A state may be taken at every step, and a walk takes as long as reading a small batch.
        if self._last is not None and self._last[0] is start and self._last[1].is_same(self.owners()):
            return False
        now = {path: nodes for path, nodes in self.nodes().items() if path in start}
        then = {path: start[path] for path in now}  # the owners depend on the number of workers, which may have changed
        return bool(differences(then, now)) or not same_key_order(then, now)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state."""
        self._start = state_dict.get("start")
        self._is_loaded, self._has_begun = self._start is not None, state_dict.get("begun", False)

    def restored(self) -> None:
        """Record the restored data as those of persistent workers, unless the state has others."""
        if self._has_begun and self._start is None and self._loader.persistent_workers:
            self._start = copy.deepcopy(self.nodes())

    @contextmanager
    def data_of_pass(self, *, resumed: bool) -> Iterator[None]:
        """Restore the data at the start of the pass in place, for the duration of the block.

        Args:
            resumed: whether the pass is resumed; if not, it starts with the present data, except persistent workers.
        """
        start, self._is_loaded = self._start if resumed or self._loader.persistent_workers else None, False
        self._has_begun = True
        with self._restored_data(start) if self._copies else self._restored_collate(start or {}):
            yield
        self._record_shared()

    @contextmanager
    def _restored_data(self, start: Nodes | None) -> Iterator[None]:
        """Restore `start`, if it is not None, for the duration of the block."""
        now = copy.deepcopy(self.nodes())
        wanted = now if start is None else _merged(now, start)
        if start is None or not self._has_changed(wanted):
            self._start, self._last = wanted, (wanted, AttributeFingerprint(self.owners()))
            yield
            return
        with self.reverted():
            try:
                lost = self.restore(wanted)
            except Exception as error:
                raise NotExact(
                    "the data of a loader's workers cannot be restored from the snapshot: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if lost:
                log.warning(
                    "these values of a loader's workers at the start of the epoch cannot be restored, and the workers "
                    "read the rest of the epoch with the present ones: %s",
                    ", ".join(f"{path} (was {what})" for path, what in lost.items()),
                )
            self._start = wanted
            with self._restored_collate(wanted) if not self._loader.num_workers else nullcontext():
                yield

    @contextmanager
    def _restored_collate(self, start: Nodes) -> Iterator[None]:
        """Set the collate_fn of `start`, if any, as a separate object during the block."""
        node, before = start.get(_LOADER, {}).get("collate_fn", MISSING), self._loader.collate_fn
        known = [self._built["collate_fn"], before]
        made = MISSING if node is MISSING else collate_of(node, known, self._collate_walk(), self._anchors())
        if made is not MISSING:
            vars(self._loader)["collate_fn"] = made
        try:
            yield
        finally:
            self._start = start
            vars(self._loader)["collate_fn"] = before

    def _collate_walk(self) -> GraphWalk:
        """Return a walk over objects that collate_fn may share: module, loader, data."""
        walk = self._walk()
        for root in () if self._module is None else module_roots(ModuleIndex.of(self._module).now()):
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
        """Note the end of the pass: later changes affect the next pass only."""
        self._warn_of_shared()
        self._shared = {}

    def _record_shared(self) -> None:
        """Record small objects that workers, just started, share with this process."""
        if not self._loader.num_workers:
            return
        walk = self._walk()
        self._nodes(walk)
        self._shared = {path: one for path, one in walk.large.items() if is_shared(one) and not is_large(one)}
        self._shared_lines = _lines_of(self._shared)
        if self._shared and self._last is not None and self._last[0] is self._start:
            # Pickling for workers has moved tensors to shared memory, which changes their nodes.
            self._start = copy.deepcopy(self._nodes(self._walk()))
            self._last = (self._start, AttributeFingerprint(self.owners()))

    def _warn_of_shared(self) -> None:
        """Warn once of shared objects that have changed while workers read ahead."""
        if not self._shared or self._has_warned:
            return
        now = _lines_of(self._shared)
        changed = [path for path, line in now.items() if line != self._shared_lines.get(path)]
        self._has_warned = bool(changed)
        if changed:
            log.warning(
                "%s has changed in memory that the workers of a loader share, while they read ahead. Their speed "
                "decides which batch shows the change first, so runs differ. Change it between epochs, or set "
                "num_workers=0",
                changed[0].replace("/", "."),
            )

    def unrestored(self) -> dict[str, object]:
        """Return path -> value of data that `data_of_pass` does not restore: large, unsupported."""
        walk = self._walk()
        self._nodes(walk)
        return walk.large | walk.deep | walk.opaque

    def collate_side_effects(self) -> ReadSideEffects:
        """Return a monitor of changes of the collate_fn from now on."""
        side_effects = ReadSideEffects((), self._loader.collate_fn, self._module)
        side_effects.begin()
        return side_effects

    def owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return path -> (owner, attributes) for all objects whose attributes are copied."""
        return {_LOADER: (self._loader, loader_attributes(self._loader)), **super().owners()}

    def restore_target(self, path: str, name: str, node: Any, live: Any) -> Any:
        """Return the loader's function at construction if `node` describes it, else `live`."""
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


def _merged(now: Nodes, start: Nodes) -> Nodes:
    """Return `start` with missing entries of `now`, as it lacks data without workers."""
    is_whole = "worker_init_fn" in start.get(_LOADER, {})
    return start if is_whole else {**now, **start, _LOADER: {**now[_LOADER], **start.get(_LOADER, {})}}


def _is_of_kind(value: object, node: Any) -> bool:
    found = GraphWalk({}, {}).node(value, "")
    return isinstance(node, Instance) and isinstance(found, Instance) and found.kind == node.kind


_PATH = "loader/collate_fn"


def collate_node(collate: Any, walk: GraphWalk) -> Any:
    """Return the node of a collate_fn.

    Args:
        collate: collate_fn of the current pass.
        walk: walk that has visited the objects that it may share with others.
    """
    return copy.deepcopy(walk.node(collate, _PATH))


def collate_of(node: Any, known: list[Any], walk: GraphWalk, anchors: dict[str, object]) -> Any:
    """Return the collate_fn that `node` describes, which shares no state with those in `known`.

    MISSING if there is neither such a function nor an object of its class.

    Args:
        node: result of `collate_node`, or node of a collate_fn from a walk over a loader.
        known: existing collate_fns, whose code it may have.
        walk: walk that has visited the objects that it may share with others.
        anchors: anchors of that walk, by name.
    """
    for number, collate in enumerate(known):
        walk.node(collate, f"{number}")
    made = _SeparateRestore(walk, anchors).value(node, MISSING, _PATH)
    if made is not MISSING:
        return made
    kind = node.kind if isinstance(node, Instance) else None
    return next((one for one in known if _name(one) == kind), MISSING)  # of a library: nodes hold only its name


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return kind_name(type(function)) if name is None else kind_text(function.__module__, name)


class _SeparateRestore(GraphRestore):
    """Builds new objects from nodes, and does not change existing ones.

    Args:
        walk: walk over existing objects.
        anchors: objects that are not copied, by name.
    """

    def __init__(self, walk: GraphWalk, anchors: dict[str, object]) -> None:
        super().__init__(walk, anchors, torch.device("cpu"))
        self._functions = [value for _, value in walk.seen.values() if isinstance(value, types.FunctionType)]
        self._copies: dict[int, object] = {}

    def claim(self, live: Any, path: str, *, fits: bool) -> bool:
        """Return whether `live` was made here."""
        return id(live) in self._copies and super().claim(live, path, fits=fits)

    def is_left_out(self, live: Any) -> bool:
        """Return whether there is a live object, which is kept unchanged."""
        return live is not MISSING

    def value(self, node: Any, live: Any, path: str) -> Any:
        """Return the object that `node` describes; the live one for functions is ignored."""
        is_code = isinstance(node, Instance) and node.form == "function"
        return super().value(node, MISSING if is_code else live, path)

    def find_function(self, kind: str, code: str | None) -> types.FunctionType | None:
        """Return a copy, with new cells, of the function with that name and code, or None."""
        alike = (one for one in self._functions if _name(one) == kind and (code is None or code_digest(one) == code))
        found = next(alike, None) or function_called(kind)
        if found is None or not (found.__closure__ or vars(found)):
            return found if found is None else self._register(found)
        cells = tuple(types.CellType(cell.cell_contents) for cell in found.__closure__ or ())
        made = types.FunctionType(found.__code__, found.__globals__, found.__name__, found.__defaults__, cells)
        made.__qualname__, made.__module__ = found.__qualname__, found.__module__
        made.__kwdefaults__ = found.__kwdefaults__
        vars(made).update(vars(found))
        return self._register(made)

    def _register(self, function: types.FunctionType) -> types.FunctionType:
        self._copies[id(function)] = function
        return function
