"""Restores the nodes that a `GraphWalk` made into live objects.

Containers, tensors, generators and objects are filled in place, so that other holders of them (a data set, a hook's
closure, a view of weights) see the restored values. A live object is used for one path only: objects that were
distinct when the snapshot was taken stay distinct, and shared objects are shared again.
"""

import itertools
import types
from collections.abc import Container, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.objects.attributes import delete_attribute, keep_order, set_state_attribute, state_attributes
from midstride.engine.objects.changes import CodeChange
from midstride.engine.objects.kinds.functions import code_digest
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.kinds.table import kind_of_node
from midstride.engine.objects.restored_memory import FilledArrays, RestoredMemory
from midstride.engine.objects.user_modules import function_called
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.object_nodes import Instance, Same, kind_name, kind_text, owners_of, step
from midstride.engine.state.row_shards import is_distributed
from midstride.engine.state.tensors import is_expanded

__all__ = ["GraphRestore"]


class GraphRestore:
    """One pass over nodes and the live objects at the same paths.

    Args:
        walk: a walk of the live objects before the restore.
        anchors: objects in other parts of the state, by name.
        device: where tensors are put that were on an accelerator and have no live counterpart.
        change: how the code that built the live objects differs from that of the snapshot; None if it does not.
    """

    def __init__(
        self, walk: GraphWalk, anchors: Mapping[str, object], device: torch.device, change: CodeChange | None = None
    ) -> None:
        self._walk, self.device = walk, device
        self.change = CodeChange() if change is None else change
        self._differing = self.change.differing
        #: a parameter that is cut over the ranks
        self.sharded_weight = next(filter(is_distributed, anchors.values()), None)
        self._known = {**{path: value for path, value in walk.seen.values()}, **anchors}
        self._made: dict[str, object] = {}
        self._used: dict[int, object] = {id(value): value for value in anchors.values()}
        self.memory = RestoredMemory(device)
        self._left_out: set[int] | None = None
        #: nodes without a lost part and their live values, by their ids, which no later ones get
        self._whole: dict[tuple[int, int, bool], tuple[Any, Any]] = {}
        self.stale: dict[str, str] = {}  #: what could not be brought back, by path, and why
        #: whether a walk of the live objects will give other nodes than those of the snapshot
        self.is_changed = False
        self.reordered: list[str] = []  #: sets that iterate in another order now

    def value(self, node: Any, live: Any, path: str) -> Any:
        """Return the value for `path`: `live`, filled from `node` if possible."""
        if self._differing and path in self._differing and live is not MISSING and self.change.replaces(path, node):
            return self.record(live, path)
        kind = type(node)
        if kind in PLAIN:
            return node
        if kind is Same:
            found = self.find(node.path)
            return self.mark_stale(path, f"the same as {node.path}", live) if found is MISSING else found
        restorer = kind_of_node(node)
        return node if restorer is None else restorer.restore(self, node, live, path)

    @cached_property
    def arrays(self) -> FilledArrays:
        """Live arrays; a restore fills some of them in place."""
        return FilledArrays(value for _, value in self._walk.seen.values() if issubclass(type(value), np.ndarray))

    def items(self, nodes: Any, before: Any, path: str) -> list[Any]:
        """Return the items that `nodes` describe, each filled into the live item at its index."""
        if not self._differing and PLAIN.issuperset(map(type, nodes)):
            return list(nodes)
        padded = itertools.chain(before, itertools.repeat(MISSING))
        pairs = enumerate(zip(nodes, padded, strict=False))
        items = (self.value(node, live, f"{path}/{index}") for index, (node, live) in pairs)
        return [None if item is MISSING else item for item in items]  # others keep their places

    def attributes(self, nodes: Mapping[str, Any], live: Any, path: str) -> None:
        """Set a live object's attributes to those of `nodes`, filling live values in place."""
        before = state_attributes(live)
        for name, node in nodes.items():
            if self.change.drops(path, name):
                self.skip(node, step(path, name))
                continue
            value = before.get(name, MISSING)
            after = self.value(node, value, step(path, name))
            if after is value or after is MISSING:
                continue
            try:
                set_state_attribute(live, name, after)
            except AttributeError:  # its class has no room for it, or a property there
                self.mark_stale(step(path, name), "set", MISSING)
        for name in before.keys() - nodes.keys():
            if not self.change.adds(path, name):
                delete_attribute(live, name)
        keep_order(live, nodes)

    def keep_whole(self, node: Any, live: Any, path: str) -> bool:
        """Return whether `node` has a part that cannot be made; if so, record that `live` stays."""
        if (lost := self.lost_part(node, live)) is None:
            return False
        whole = node.kind if isinstance(node, Instance) else f"a {type(node).__name__}"
        self.mark_stale(path, whole if lost is node else f"{whole} with a {_word(lost)}", live)
        return True

    def lost_part(self, node: Any, live: Any, *, is_late: bool = False) -> Any:
        """Return a part of `node` that is lost; see `Kind.lost_part`."""
        if type(node) in PLAIN or (key := (id(node), id(live), is_late)) in self._whole:
            return None
        kind = kind_of_node(node)
        lost = None if kind is None else kind.lost_part(self, node, live, is_late=is_late)
        if lost is None and isinstance(node, Instance):
            self._whole[key] = node, live
        return lost

    def hold(self, paths: Container[str]) -> None:
        """Reserve the live objects at `paths`, and those inside of them, for these paths."""
        for path, value in self._walk.seen.values():
            if any(where in paths for where in owners_of(path)):
                self._used.setdefault(id(value), value)

    def describe(self, live: Any) -> Any:
        """Return the node of a live object on its own."""
        return None if live is MISSING else GraphWalk({}, {}).node(live, "")

    def is_same_opaque(self, node: Instance, live: Any) -> bool:
        """Return whether `live` is opaque, too, and of the class of `node`."""
        found = self.describe(live)
        return isinstance(found, Instance) and (found.form, found.kind) == (node.form, node.kind)

    def skip(self, node: Any, path: str) -> None:
        """Build the objects of `node`, to which others may refer, without a value at `path`."""
        stale = dict(self.stale)
        self.value(node, MISSING, path)
        self.stale = stale

    def claim(self, live: Any, path: str, *, fits: bool) -> bool:
        """Claim `live` for `path`; return whether it fits and is not used for another path."""
        free = fits and id(live) not in self._used
        if free:
            self.record(live, path)
        return free

    def is_anchor(self, live: Any) -> bool:
        """Return whether the object `live` is in another part of the state."""
        return id(live) in self._walk.anchors

    def is_left_out(self, live: Any) -> bool:
        """Return whether the walk of the live objects has left out `live`, too."""
        if self._left_out is None:
            walk = self._walk
            self._left_out = {
                id(value) for value in (*walk.large.values(), *walk.deep.values(), *walk.as_built.values())
            }
        return id(live) in self._left_out

    def takes(self, live: Any, node: Tensor, *, was_on_host: bool) -> bool:
        """Return whether the tensor `live` can take the values of `node`.

        It must be on the host if and only if the saved tensor was, and share memory with the same tensors.
        """
        if not isinstance(live, Tensor) or live.is_inference() or live.layout != torch.strided:
            return False
        if live.is_cpu != was_on_host:
            return False
        if is_expanded(live) or (live.shape, live.dtype, live.layout) != (node.shape, node.dtype, node.layout):
            return False
        if self._walk.base_of(live) is not None:  # a parameter's memory, and the node is apart from it
            return False
        return self.memory.fits(live, node)

    def is_in_weight(self, array: "np.ndarray[Any, Any]") -> bool:
        """Return whether an array lies in the memory of a parameter or buffer."""
        return self._walk.array_view(array) is not None

    def weight_at(self, rows: Tensor) -> str | None:
        """Return the name of the parameter whose rows on this rank are `rows`, in the same memory."""
        return self._walk.weight_at(rows)

    def record(self, value: Any, path: str) -> Any:
        """Record `value` as the value at `path`, and return it."""
        self._used[id(value)] = self._made[path] = value
        return value

    def find(self, name: str) -> Any:
        """Return the object at a path of this tree or another part of the state, or MISSING."""
        return self._made.get(name, self._known.get(name, MISSING))

    def find_function(self, kind: str, code: str | None) -> types.FunctionType | None:
        """Return the function called `kind`, built in this attempt or loaded, or None.

        Of several functions it is the one whose code has the digest `code`.
        """
        built = {id(value): value for value in self._known.values() if isinstance(value, types.FunctionType)}
        found = [value for value in built.values() if kind_text(value.__module__, value.__qualname__) == kind]
        found = [value for value in found if code_digest(value) == code] if code is not None else found
        return found[0] if len(found) == 1 else function_called(kind)

    def mark_changed(self) -> None:
        """Record that a walk of the live objects will give other nodes than the snapshot's."""
        self.is_changed = True

    def mark_stale(self, path: str, was: str, live: Any) -> Any:
        """Record that the value at `path` cannot be restored; return `live`, which may be MISSING."""
        self.stale[path] = f"{was}, now {'missing' if live is MISSING else kind_name(type(live))}"
        return live


def _word(node: Any) -> str:
    return str(node.kind) if isinstance(node, Instance) else type(node).__name__
