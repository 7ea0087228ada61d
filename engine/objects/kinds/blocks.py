"""Blocks: long lists and deques whose items have one structure.

An example is the transitions of a replay buffer. A block is written column by column: numbers as one array, and
arrays or tensors of one form in a pool, each once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from midstride.engine.objects.attributes import set_state_attribute, state_attributes
from midstride.engine.objects.classes import class_called, fresh, is_made_anew
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.state.object_nodes import Instance, Same, kind_name, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["LEAST", "Blocks", "describe_block", "restored_maxlen"]

#: items from which on a container is tried as a block
LEAST = 256
#: types whose columns are arrays -> dtype
_PACKED: dict[type, Any] = {float: np.float64, bool: np.bool_}
_INT = np.iinfo(np.int64)


class _NotAlikeError(Exception):
    """The items differ in structure, or are held elsewhere, too."""


def describe_block(walk: "GraphWalk", items: Any, path: str) -> Instance | None:
    """Return the node of a list or deque as a block; None if its items differ in structure."""
    kind = type(items[0]) if len(items) >= LEAST else None
    if kind is None or kind in PLAIN or {*map(type, items)} != {kind}:
        return None
    columns = _Columns(walk, path)
    try:
        column = columns.describe([*items], "")
        pools = [pool.describe(walk) for pool in columns.pools.values()]
    except _NotAlikeError:
        return None
    columns.meet()
    state = {"length": len(items), "maxlen": getattr(items, "maxlen", None), "column": column, "pools": pools}
    return Instance(Blocks.form, kind_name(type(items)), state)


class _Columns:
    """Describes the items of one block.

    Args:
        walk: the walk.
        path: path of the block.
    """

    def __init__(self, walk: "GraphWalk", path: str) -> None:
        self._walk, self._path = walk, path
        self.pools: dict[Any, _Pool] = {}
        #: objects in the order in which they are met, and the ends of their paths
        self._met: list[tuple[Sequence[Any], str]] = []

    def meet(self) -> None:
        """Record the objects of the block, each by its first path."""
        seen = self._walk.seen
        for values, end in self._met:
            seen.update((id(value), (f"{self._path}/{at}{end}", value)) for at, value in enumerate(values))
        for number, pool in enumerate(self.pools.values()):
            own = ((at, value) for at, value in enumerate(pool.values) if at not in pool.met)
            seen.update((id(value), (f"{self._path}/pool {number}/{at}", value)) for at, value in own)

    def describe(self, items: list[Any], end: str) -> dict[str, Any]:
        """Return the column of values of one type; `end` is the end of their paths."""
        kinds = {*map(type, items)}
        kind = type(items[0])
        if kinds <= PLAIN:
            return {"values": self._packed(items, kinds)}
        if len(kinds) > 1:
            raise _NotAlikeError
        if issubclass(kind, np.generic) and items[0].dtype.kind in "biuf":
            return {"scalars": np.array(items, dtype=items[0].dtype)}
        if kind is np.ndarray or kind is Tensor:
            return self._pooled(items)
        if issubclass(kind, tuple):
            return self._of_tuples(items, kind, end)
        return self._of_objects(items, kind, end)

    def _packed(self, items: list[Any], kinds: set[type]) -> Any:
        if int in kinds and self._walk.has_address(items):
            raise _NotAlikeError
        (kind, *others) = kinds
        if not others and kind in _PACKED:
            return np.array(items, dtype=_PACKED[kind])
        if not others and kind is int and _INT.min <= min(items) and max(items) <= _INT.max:
            return np.array(items, dtype=np.int64)
        return items

    def _pooled(self, items: list[Any]) -> dict[str, Any]:
        first = items[0]
        form = (type(first), first.dtype, tuple(first.shape))
        pool = self.pools.setdefault(form, _Pool(len(self.pools)))
        return {"pool": pool.number, "indices": np.array(pool.add(items), dtype=np.int64)}

    def _of_tuples(self, items: list[Any], kind: Any, end: str) -> dict[str, Any]:
        if len({*map(len, items)}) > 1 or not (kind is tuple or hasattr(kind, "_fields")) or not items[0]:
            raise _NotAlikeError
        parts = [self.describe([*column], f"{end}/{at}") for at, column in enumerate(zip(*items, strict=True))]
        return {"tuples": parts, "kind": kind_name(kind)}

    def _of_objects(self, items: list[Any], kind: Any, end: str) -> dict[str, Any]:
        self._claim(items, end)
        if kind is dict:
            named = items
        elif is_made_anew(kind) and not issubclass(kind, (nn.Module, list, dict, set, deque)):
            named = [*map(state_attributes, items)]
        else:
            raise _NotAlikeError
        names = [*named[0]]
        if not all(type(name) is str for name in names) or any([*one] != names for one in named):
            raise _NotAlikeError
        parts = [self.describe([one[name] for one in named], step(end, name)) for name in names]
        return {"objects": parts, "names": names, "kind": kind_name(kind)}

    def _claim(self, items: list[Any], end: str) -> None:
        """Take objects that are met here first, each once."""
        ids = {*map(id, items)}
        is_new = len(ids) == len(items) and self._walk.seen.keys().isdisjoint(ids)
        if not is_new or not self._walk.anchors.keys().isdisjoint(ids):
            raise _NotAlikeError
        self._met.append((items, end))


class _Pool:
    """Arrays, or tensors, of one form, each once.

    Args:
        number: number of the pool in its block.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.values: list[Any] = []
        self.met: dict[int, Same] = {}  #: those that were met before the block, by index
        self._indices: dict[int, int] = {}

    def add(self, items: list[Any]) -> list[int]:
        """Return the indices of items in the pool."""
        indices, values = self._indices, self.values
        found = []
        for item in items:
            index = indices.setdefault(id(item), len(values))
            if index == len(values):
                values.append(item)
            found.append(index)
        return found

    def describe(self, walk: "GraphWalk") -> dict[str, Any]:
        """Return the values stacked, and those that were met before."""
        seen, anchors = walk.seen, walk.anchors
        for at, value in enumerate(self.values):
            if id(value) in seen or id(value) in anchors:
                self.met[at] = Same(anchors[id(value)] if id(value) in anchors else seen[id(value)][0])
        is_tensor = type(self.values[0]) is Tensor
        stacked = _stacked_tensors(walk, self.values) if is_tensor else _stacked_arrays(walk, self.values)
        return {"stacked": stacked, **({"met": self.met} if self.met else {})}


def _stacked_arrays(walk: "GraphWalk", values: list[Any]) -> Any:
    first = values[0]
    forms = {(value.dtype, value.shape, value.strides, value.flags.writeable) for value in values}
    if len(forms) > 1 or first.dtype.kind not in "biufc" or not (first.flags.c_contiguous and first.flags.writeable):
        raise _NotAlikeError
    if any(walk.array_view(value) is not None for value in values):
        raise _NotAlikeError
    return np.stack(values)


def _stacked_tensors(walk: "GraphWalk", values: list[Any]) -> Any:
    first = values[0]
    forms = {(value.dtype, value.shape, value.stride()) for value in values}
    is_plain = first.is_cpu and first.layout == torch.strided and first.is_contiguous() and not first.is_quantized
    if len(forms) > 1 or not is_plain or not all(map(_is_alone, values)):
        raise _NotAlikeError
    addresses = {value.data_ptr() for value in values}
    tensors = (one for _, one in walk.seen.values() if type(one) is Tensor)
    others = (one for one in tensors if one.is_cpu and one.layout == torch.strided)
    if len(addresses) < len(values) or any(one.untyped_storage().data_ptr() in addresses for one in others):
        raise _NotAlikeError
    if any(walk.base_of(value) is not None for value in values):
        raise _NotAlikeError
    return torch.stack(values)


def _is_alone(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own, no gradient and no attributes."""
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.nbytes > 0
    is_plain = not (vars(tensor) or tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    return is_whole and is_plain and tensor.grad is None


def restored_maxlen(restore: "GraphRestore", maxlen: int | None, live: Any, path: str) -> int | None:
    """Return the `maxlen` for the container at `path`; the live one if settings are taken."""
    found: int | None = restore.value(maxlen, live.maxlen if isinstance(live, deque) else MISSING, step(path, "maxlen"))
    return found


class Blocks(Kind):
    """Lists and deques that are written as blocks."""

    form = "block"

    def matches(self, kind: type) -> bool:
        """Return False: lists and deques decide whether they are."""
        return False

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill the container in place, with new items."""
        state = node.state
        kind: Any = deque if node.kind == kind_name(deque) else list
        maxlen = restored_maxlen(restore, state["maxlen"], live, path)
        fits = type(live) is kind and getattr(live, "maxlen", None) == maxlen
        target: Any = live
        if not restore.claim(live, path, fits=fits):
            target = restore.record(deque(maxlen=maxlen) if kind is deque else [], path)
        pools = [[*_pool_values(restore, pool, f"{path}/pool {at}")] for at, pool in enumerate(state["pools"])]
        items = _restored(restore, state["column"], pools, path, "", state["length"])
        if items is None:
            return restore.mark_stale(path, f"{node.kind} of objects of a class that is not loaded", live)
        target.clear()
        target.extend(items)
        return target


def _pool_values(restore: "GraphRestore", pool: dict[str, Any], path: str) -> Iterator[Any]:
    stacked, met = pool["stacked"], pool.get("met", {})
    rows: Any = stacked.unbind(0) if isinstance(stacked, Tensor) else stacked
    for at, row in enumerate(rows):
        if at in met:
            yield restore.find(met[at].path)
        else:
            yield restore.record(row.clone() if isinstance(row, Tensor) else np.array(row), f"{path}/{at}")


def _restored(
    restore: "GraphRestore", column: dict[str, Any], pools: list[list[Any]], path: str, end: str, length: int
) -> list[Any] | None:
    """Return the values of a column; None if a class is not loaded."""
    if "values" in column:
        values = column["values"]
        return values.tolist() if isinstance(values, np.ndarray) else list(values)
    if "scalars" in column:
        return [*column["scalars"]]
    if "pool" in column:
        pool = pools[column["pool"]]
        return [pool[index] for index in column["indices"].tolist()]
    ends = (
        [f"{end}/{at}" for at in range(len(column["tuples"]))]
        if "tuples" in column
        else [step(end, name) for name in column["names"]]
    )
    parts = column["tuples"] if "tuples" in column else column["objects"]
    found = [_restored(restore, part, pools, path, where, length) for part, where in zip(parts, ends, strict=True)]
    columns = [one for one in found if one is not None]
    if len(columns) < len(parts):
        return None
    rows: Any = zip(*columns, strict=True) if columns else repeat((), length)
    if "tuples" in column:
        return _made_tuples(rows, column["kind"])
    return _made_objects(restore, rows, column, path, end)


def _made_tuples(rows: Any, name: str) -> list[Any] | None:
    if name == kind_name(tuple):
        return [*rows]
    kind = class_called(name, MISSING, tuple)
    return None if kind is None else [tuple.__new__(kind, row) for row in rows]


def _made_objects(restore: "GraphRestore", rows: Any, column: dict[str, Any], path: str, end: str) -> list[Any] | None:
    names, made = column["names"], []
    kind = dict if column["kind"] == kind_name(dict) else class_called(column["kind"], MISSING, object)
    if kind is None:
        return None
    for at, row in enumerate(rows):
        one = dict(zip(names, row, strict=True)) if kind is dict else fresh(kind)
        if kind is not dict:
            for name, value in zip(names, row, strict=True):
                set_state_attribute(one, name, value)
        made.append(restore.record(one, f"{path}/{at}{end}"))
    return made
