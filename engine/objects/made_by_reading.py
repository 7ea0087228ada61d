"""Objects that reading data makes and no file can hold, such as open files."""

import copy
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.kinds.opaque import is_made_in_each_process
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.differences import differences
from midstride.engine.state.object_nodes import Instance, Same, owners_of, step

__all__ = ["MadeByReading", "unwritable_in"]


class MadeByReading:
    """Objects that reading has made and no file can hold, and objects around them.

    Those count if reading has made them, too. They are neither state nor named while nothing changes them, and neither
    are flags that reading sets beside them. What changes, such as a number of reads, is state; an attempt that cannot
    restore it says so.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}  #: nodes as made, by path
        self._flags: set[str] = set()  #: paths of flags that reading has set beside it
        self._built: dict[str, Any] = {}  #: nodes of the attributes of data when training begins, by path
        self._unwritable: Container[str] = ()  #: paths of what no file can hold then
        #: paths of what no file can hold and reading has made
        self.paths: set[str] = set()

    def begin(self, walk: GraphWalk, built: Mapping[str, Any]) -> None:
        """Record what `walk` has met before data are read.

        Args:
            walk: the walk.
            built: nodes of attributes, by path.
        """
        self._unwritable = unwritable_in(walk).keys()
        self._built = {path: node for path, node in built.items() if path.startswith("data/")}

    def note(self, paths: Collection[str], data: Mapping[str, Any]) -> None:
        """Record that reading has made the objects at `paths`, which no file can hold.

        Args:
            paths: their paths.
            data: nodes of the attributes of data, by path.
        """
        self.paths.update(paths)
        if not paths:
            return
        nodes, built = dict(_nodes_by_path(data)), dict(_nodes_by_path(self._built))
        for path in paths:
            owners = [owner for owner in reversed([*owners_of(path)]) if owner in nodes]
            made = next((owner for owner in owners if owner not in built), path)
            if made in nodes:
                self._made[made] = copy.deepcopy(nodes[made])

    def note_late(self, walk: GraphWalk, data: Mapping[str, Any]) -> None:
        """Record the files, locks and the like that later reads have made."""
        found = {
            path
            for path, value in unwritable_in(walk).items()
            if path.startswith("data/") and path not in self._unwritable and is_made_in_each_process(value)
        }
        self.note([path for path in found - self.paths if self._made.keys().isdisjoint(owners_of(path))], data)
        self.paths.update(found)

    def note_flags(self, before: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Record flags that reading has set, such as `is_open`.

        They would tell a resumed run that a file is there.

        Args:
            before: nodes of attributes before data were read, by path.
            data: those after it.
        """
        earlier, now = dict(_nodes_by_path(before)), _nodes_by_path(data)
        flags = [(path, node, earlier.get(path, MISSING)) for path, node in now if _is_flag(node)]
        self._flags.update(path for path, node, then in flags if then is MISSING or _is_other_flag(then, node))

    def is_in(self, owner: str) -> bool:
        """Return whether reading has made something in the data at the path `owner`."""
        return any(path.startswith(f"{owner}/") for path in self._made)

    def state_changed(self, before: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
        """Return the paths of attributes that reading has changed and a snapshot holds.

        Generators do not count: they are seeded for each sample.
        """
        return [
            path
            for path, node in self.without(data).items()
            if not (isinstance(node, Instance) and node.form == "generator")
            if differences(before.get(path, MISSING), node)
        ]

    def without(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return nodes of attributes of data, by path, without what reading has made."""
        if not (made := self._unchanged(data)):
            return dict(data)
        found = {path: _without(node, self._built.get(path, MISSING), path, made) for path, node in data.items()}
        return {path: node for path, node in found.items() if node is not MISSING}

    def kept(self, saved: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the nodes `saved`, by path, with what reading has made, which a restore leaves."""
        if not (made := self._unchanged(data)):
            return dict(saved)
        found = {path: _with_live(saved.get(path, MISSING), node, path, made) for path, node in data.items()}
        return {**saved, **{path: node for path, node in found.items() if node is not MISSING}}

    def _unchanged(self, data: Mapping[str, Any]) -> frozenset[str]:
        """Return the paths of what is as reading made it."""
        now = dict(_nodes_by_path(data)) if self._made else {}
        same = {path for path, node in self._made.items() if path in now and not differences(node, now[path])}
        return frozenset(same | self._flags)


def unwritable_in(walk: GraphWalk) -> dict[str, object]:
    """Return what `walk` has met and no file can hold, by path."""
    return {**walk.opaque, **walk.held, **walk.idle, **walk.large}


def _without(node: Any, before: Any, path: str, made: Container[str]) -> Any:
    """Return `node` without what reading has `made`; MISSING if that is `node` itself.

    At its place is the node from `before`, if there is one.
    """
    if path in made or (type(node) is Same and node.path in made):
        return before
    parts, others = _parts(node), _parts(before)
    found = {key: _without(part, others.get(key, MISSING), step(path, key), made) for key, part in parts.items()}
    kept = {key: part for key, part in found.items() if part is not MISSING}
    if not isinstance(node, (dict, Instance)) and [*kept] != [*range(len(kept))]:
        return node  # other items would take the places of those left out
    return _rebuilt(node, kept)


def _with_live(node: Any, live: Any, path: str, made: Container[str]) -> Any:
    """Return `node` with the live objects that reading has `made`."""
    if path in made or (type(live) is Same and live.path in made):
        return live
    if node is MISSING:
        return MISSING
    own, others = _parts(node), _parts(live)
    found = {key: _with_live(own.get(key, MISSING), part, step(path, key), made) for key, part in others.items()}
    kept = {key: part for key, part in found.items() if part is not MISSING}
    return _rebuilt(node, {**kept, **{key: part for key, part in own.items() if key not in kept}})


def _rebuilt(node: Any, parts: dict[Any, Any]) -> Any:
    """Return `node` with other nodes of attributes or items."""
    own = _parts(node)
    if own.keys() == parts.keys() and all(parts[key] is part for key, part in own.items()):
        return node
    if isinstance(node, Instance):
        return replace(node, state={**node.state, "attributes": OrderedDict(parts)})
    if isinstance(node, dict):
        items = copy.copy(node)
        items.clear()
        items.update(parts)
        return items
    return deque(parts.values(), node.maxlen) if isinstance(node, deque) else type(node)(parts.values())


def _is_flag(node: Any) -> bool:
    """Return whether `node` is of a truth value, or of a list or an array of them."""
    is_list = type(node) is list and {*map(type, node)} == {bool}
    return type(node) is bool or is_list or getattr(node, "dtype", None) in (np.dtype(bool), torch.bool)


def _is_other_flag(before: Any, now: Any) -> bool:
    return _is_flag(before) and bool(differences(before, now))


def _parts(node: Any) -> dict[Any, Any]:
    """Return the nodes of an object's attributes, or of a container's items."""
    if isinstance(node, Instance):
        found: dict[Any, Any] = node.state["attributes"] if node.form == "object" else {}
        return found
    if isinstance(node, (list, tuple, deque)):
        return dict(enumerate(node))
    return node if isinstance(node, dict) else {}


def _nodes_by_path(nodes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield paths and nodes of `nodes`, which are by path, and of those in them."""
    for path, node in nodes.items():
        yield path, node
        yield from _nodes_by_path({step(path, key): part for key, part in _parts(node).items()})
