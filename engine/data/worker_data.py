"""The data of a loader as its workers have them, or copies that are read: as they were when a pass began.

What training changes of a data set, a loader or a collate_fn later, they do not see before they are made anew. Those of
a run that goes on inside an epoch are made of what those before them had.
"""

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from midstride.engine.code_origin import is_user_class
from midstride.engine.errors import NotExact
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.graph_restore import GraphRestore
from midstride.engine.objects.plain_values import PLAIN
from midstride.engine.state.differences import differences, same_key_order
from midstride.engine.state.nodes import Instance

__all__ = ["Nodes", "WorkerData", "loader_attributes", "users_data"]

#: attributes by the path of their owner and by name, as nodes
Nodes = dict[str, dict[str, Any]]
_LOADER = "loader"
#: of a loader, what torch keeps in each and no user sets anew
_OF_LOADERS = frozenset(vars(DataLoader(TensorDataset()))) - {"collate_fn", "worker_init_fn"}


def loader_attributes(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader holds that users set, and may set anew."""
    return {name: value for name, value in vars(loader).items() if name not in _OF_LOADERS}


def users_data(name: str, dataset: object) -> Iterator[tuple[str, Any]]:
    """Yield `dataset`, or those that torch's own read for it, where they are the user's."""
    if isinstance(dataset, Subset):
        yield from users_data(f"{name}/dataset", dataset.dataset)
    elif isinstance(dataset, (ConcatDataset, ChainDataset)) and isinstance(dataset.datasets, (list, tuple)):
        for number, inner in enumerate(dataset.datasets):
            yield from users_data(f"{name}/datasets/{number}", inner)
    elif is_user_class(type(dataset)) and hasattr(dataset, "__dict__"):
        yield name, dataset


class WorkerData:
    """What is copied when a pass begins; where its data are not, the functions that it goes on with.

    Args:
        loader: whose data they are.
        module: which data may hold, and other parts of the state keep.
        copies: that copies of the data are read; else they are read as they are, or there is nothing to be copied.
    """

    def __init__(self, loader: DataLoader[Any], module: nn.Module | None = None, *, copies: bool) -> None:
        self._loader, self._module, self._copies = loader, module, copies
        #: what the copies that are read were made of; None before the first
        self._start: Nodes | None = None
        #: whether that is a state's, which no pass has gone on with yet
        self._is_loaded = False
        #: whether a pass has begun, in this attempt or before
        self._has_begun = False
        #: functions may be replaced in training, and only those of the user's files are found by their names
        self._built = {name: vars(loader)[name] for name in ("collate_fn", "worker_init_fn")}
        #: what a pass began with, and the attributes that it was found in, if those hold nothing that can change
        self._last: tuple[Nodes, dict[str, dict[str, Any]]] | None = None

    def leave_data(self) -> None:
        """Leave the data as they are from here on, also at the end of a block of `as_begun`: they cannot be copied."""
        self._copies = False
        self._start = {path: nodes for path, nodes in (self._start or {}).items() if path == _LOADER}

    def _has_changed(self, start: Nodes) -> bool:
        """Return whether what is copied now would be something else than `start`."""
        # A state may be taken at every step, and a walk takes as long as a small batch.
        if self._last is not None and self._last[0] is start and _are(self._last[1], self._attributes()):
            return False
        now = {path: nodes for path, nodes in self._nodes().items() if path in start}
        then = {path: start[path] for path in now}  # the number of workers may have changed, and with it the owners
        return bool(differences(then, now)) or not same_key_order(then, now)

    def state_dict(self) -> dict[str, Any]:
        """Return whether copies were made, and of what, unless the next ones would be made of the same."""
        start = self._start
        is_kept = start is not None and (self._is_loaded or self._has_changed(start))
        return {**({"begun": True} if self._has_begun else {}), **({"start": start} if is_kept else {})}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it back."""
        self._start = state_dict.get("start")
        self._is_loaded, self._has_begun = self._start is not None, state_dict.get("begun", False)

    def restored(self) -> None:
        """Note what the data hold when a state is back: what workers that stay began with, unless it says other."""
        if self._has_begun and self._start is None and self._loader.persistent_workers:
            self._start = copy.deepcopy(self._nodes())

    @contextmanager
    def as_begun(self, *, goes_on: bool) -> Iterator[None]:
        """Give the data within the block what they held when the copies were made that a pass goes on with, in place.

        Args:
            goes_on: with copies made before; else, but for workers that stay, they are made of the data as they are.
        """
        start, self._is_loaded = self._start if goes_on or self._loader.persistent_workers else None, False
        self._has_begun = True
        now, owners = copy.deepcopy(self._nodes()), self._owners()
        if start is None or not self._has_changed(start):
            own = self._attributes()
            self._start = now if start is None else start
            self._last = (self._start, own) if all(map(_holds_fixed, own.values())) else None
            yield
            return
        try:
            self._fill(start)
        except Exception as error:
            raise NotExact(
                "the snapshot says what the workers of a loader began with, and the data cannot take it: "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            yield
        finally:
            for path, (owner, own) in self._owners().items():
                for name in own.keys() - owners[path][1].keys():
                    del vars(owner)[name]
                vars(owner).update(owners[path][1])
            self._fill(now)

    def left_out(self) -> dict[str, object]:
        """Return what of the data is large, or nothing that can be kept, by path: `as_begun` leaves it as it is."""
        walk = self._walk()
        for path, (_, own) in self._owners().items():
            walk.root_attributes(own, path, is_small=True)
        return walk.large | walk.deep | walk.opaque

    def _owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return those whose attributes are copied, by path, with the attributes."""
        own = {_LOADER: (self._loader, loader_attributes(self._loader))}
        if not self._copies:
            return own
        data: dict[str, Dataset[Any]] = dict(users_data("data set", self._loader.dataset))
        return own | {path: (owner, dict(vars(owner))) for path, owner in data.items()}

    def _attributes(self) -> dict[str, dict[str, Any]]:
        return {path: own for path, (_, own) in self._owners().items()}

    def _anchors(self) -> dict[str, object]:
        named: dict[str, object] = {path: owner for path, (owner, _) in self._owners().items()}
        return named if self._module is None else named | {"module": self._module}

    def _nodes(self) -> Nodes:
        walk = self._walk()
        return {path: walk.root_attributes(own, path, is_small=True) for path, (_, own) in self._owners().items()}

    def _walk(self) -> GraphWalk:
        return GraphWalk({id(value): name for name, value in self._anchors().items()}, {})

    def _fill(self, nodes: Nodes) -> None:
        walk, owners = self._walk(), self._owners()
        for path, (_, own) in owners.items():
            walk.root_attributes(own, path, is_small=True)
        filling = GraphRestore(walk, self._anchors(), torch.device("cpu"))
        for path, (owner, own) in owners.items():
            if path not in nodes:
                continue
            wanted = copy.deepcopy(nodes[path])
            for name, node in wanted.items():
                live = own.get(name, MISSING)
                if (built := self._built.get(name)) is not None and path == _LOADER and _is_of_kind(built, node):
                    live = built
                value = filling.put(node, live, f"{path}/{name}")
                if value is not MISSING:
                    vars(owner)[name] = value
            for name in own.keys() - wanted.keys():
                del vars(owner)[name]


def _are(owners: dict[str, dict[str, Any]], others: dict[str, dict[str, Any]]) -> bool:
    """Return whether the same owners have the same attributes, by identity."""
    return owners.keys() == others.keys() and all(
        own.keys() == others[path].keys() and all(others[path][name] is value for name, value in own.items())
        for path, own in owners.items()
    )


def _holds_fixed(attributes: dict[str, Any]) -> bool:
    return all(map(_is_fixed, attributes.values()))


def _is_fixed(value: object) -> bool:
    """Return whether nothing in `value` can change: it is a plain value, or a function that closes over nothing."""
    held = ("__closure__", "__defaults__", "__kwdefaults__")
    is_function = isinstance(value, types.FunctionType)
    return type(value) in PLAIN or (is_function and not any(getattr(value, name) for name in held))


def _is_of_kind(value: object, node: Any) -> bool:
    found = GraphWalk({}, {}).node(value, "")
    return isinstance(node, Instance) and isinstance(found, Instance) and found.kind == node.kind
