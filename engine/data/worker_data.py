"""The data of a loader as its workers have them, or copies that are read: as they were when a pass began.

What training changes of a data set, a loader or a collate_fn later, they do not see before they are made anew. Those of
a run that goes on inside an epoch are made of what those before them had.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine.data.held_data import HeldData, Nodes, is_value, users_data
from midstride.engine.data.identity_record import IdentityRecord
from midstride.engine.errors import NotExact
from midstride.engine.objects.attributes import attributes_of
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.state.differences import differences, same_key_order
from midstride.engine.state.nodes import Instance

__all__ = ["WorkerData", "loader_attributes"]

_LOADER = "loader"
#: of a loader, what torch keeps in each and no user sets anew
_OF_LOADERS = frozenset(vars(DataLoader(TensorDataset()))) - {"collate_fn", "worker_init_fn"}


def loader_attributes(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader holds that users set, and may set anew; its data set where that is a list or the like."""
    own = {name: value for name, value in attributes_of(loader).items() if name not in _OF_LOADERS}
    return {**own, "dataset": loader.dataset} if is_value(loader.dataset) else own


class WorkerData(HeldData):
    """What is copied when a pass begins; where its data are not, the functions that it goes on with.

    Args:
        loader: whose data they are.
        module: which data may hold, and other parts of the state keep.
        copies: that copies of the data are read; else they are read as they are, or there is nothing to be copied.
    """

    def __init__(self, loader: DataLoader[Any], module: nn.Module | None = None, *, copies: bool) -> None:
        super().__init__(dict(users_data("data set", loader.dataset)) if copies else {}, module)
        self._loader, self._copies = loader, copies
        #: what the copies that are read were made of; None before the first
        self._start: Nodes | None = None
        #: whether that is a state's, which no pass has gone on with yet
        self._is_loaded = False
        #: whether a pass has begun, in this attempt or before
        self._has_begun = False
        #: functions may be replaced in training, and only those of the user's files are found by their names
        self._built = {name: vars(loader)[name] for name in ("collate_fn", "worker_init_fn")}
        #: what a pass began with, and what it was found in
        self._last: tuple[Nodes, IdentityRecord] | None = None

    def leave_data(self) -> None:
        """Leave the data as they are from here on, also at the end of a block of `as_begun`: they cannot be copied."""
        self._given, self._copies = {}, False

    def state_dict(self, collate: Any) -> dict[str, Any]:
        """Return whether a pass has begun, and of what, unless one that goes on would find the same.

        Args:
            collate: which makes the batches of the pass.
        """
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
        return {_LOADER: {"collate_fn": copy.deepcopy(self._walk().node(collate, "loader/collate_fn"))}}

    def _has_changed(self, start: Nodes) -> bool:
        """Return whether what is copied now would be something else than `start`."""
        # A state may be taken at every step, and a walk takes as long as a small batch.
        if self._last is not None and self._last[0] is start and self._last[1].is_unchanged(self._attributes()):
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
        now = copy.deepcopy(self.nodes()) if self._copies or start is not None else {}
        wanted = start if self._copies or start is None else _with_collate(now, start)
        if wanted is None or not self._has_changed(wanted):
            self._start = now if wanted is None else wanted
            self._last = self._start, IdentityRecord(self._attributes())
            yield
            return
        with self.reverted():
            try:
                self.fill(wanted)
            except Exception as error:
                raise NotExact(
                    "the snapshot says what the workers of a loader began with, and the data cannot take it: "
                    f"{type(error).__name__}: {error}"
                ) from error
            self._start = wanted
            yield

    def left_out(self) -> dict[str, object]:
        """Return what of the data is large, or nothing that can be kept, by path: `as_begun` leaves it as it is."""
        walk = self._walk()
        self._nodes(walk)
        return walk.large | walk.deep | walk.opaque

    def owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return those whose attributes are copied, by path, with the attributes."""
        return {_LOADER: (self._loader, loader_attributes(self._loader)), **super().owners()}

    def _attributes(self) -> list[dict[str, Any]]:
        return [own for _, own in self.owners().values()]

    def filled(self, path: str, name: str, node: Any, live: Any) -> Any:
        """Return the function that the code has built the loader with, where `node` is of it; else what stands there.

        Where nothing is copied, a pass goes on with its own collate_fn, beside the one that training has set.
        """
        if path != _LOADER or name not in self._built:
            return live
        value = self._built[name]
        if _is_of_kind(value, node) and (self._copies or node.form in ("function", "opaque")):
            return value
        return live if self._copies else MISSING


def _with_collate(now: Nodes, start: Nodes) -> Nodes:
    """Return `now` with the collate_fn of `start`."""
    loader = {name: node for name, node in start.get(_LOADER, {}).items() if name == "collate_fn"}
    return {**now, _LOADER: {**now[_LOADER], **loader}}


def _is_of_kind(value: object, node: Any) -> bool:
    found = GraphWalk({}, {}).node(value, "")
    return isinstance(node, Instance) and isinstance(found, Instance) and found.kind == node.kind
