"""Object graph: describes a run's state beyond weights, each object once, by identity.

A walk begins at roots (attributes of modules, callbacks, data) and describes every object that it meets as a node:
plain values and containers as such, every other object as an `Instance`. An object that was met before, or that is in
another part of the state (a parameter, a submodule, the trainer), becomes a `Same`: it is written once, and shared
again on resume. An object that no file can hold becomes an opaque instance, of which only the kind is known.
"""

import operator
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from midstride.engine.objects.array_memory import address_of, owner_of
from midstride.engine.objects.kinds.opaque import LEFT_OUT
from midstride.engine.objects.kinds.plain import ADDRESSES, PLAIN
from midstride.engine.objects.kinds.table import describer_of, kind_of
from midstride.engine.objects.kinds.tensors import has_memory
from midstride.engine.objects.left_out import content_digest, is_large, is_shared
from midstride.engine.state.object_nodes import Same, View, step
from midstride.engine.state.row_shards import is_distributed, row_shard_of, start_of
from midstride.engine.state.torch_internals import is_view_of_one

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["DEEPEST", "LOWEST_ADDRESS", "AsBuilt", "GraphWalk"]

#: largest nesting depth that is described: each level takes several Python frames to write and to read
DEEPEST = 64

#: lowest possible address of an object
LOWEST_ADDRESS = 1 << 16


class AsBuilt:
    """Objects of libraries as built: digests of large values, and objects with a `state_dict`."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._stateful: dict[int, object] = {}
        self._has_begun = False

    def begin(self) -> None:
        """Record no more: training begins."""
        self._has_begun = True

    def is_same(self, path: str, digest: str) -> bool:
        """Return whether the value at `path` had this digest; until training begins, record it."""
        if not self._has_begun:
            self._digests[path] = digest
        return self._digests.get(path) == digest

    def is_late(self, value: object) -> bool:
        """Return whether `value` was first met after training began; until then, record it."""
        if not self._has_begun:
            self._stateful[id(value)] = value
        return id(value) not in self._stateful


class GraphWalk:
    """One walk over live objects.

    Args:
        anchors: id of an object in another part of the state -> its name.
        tensors: parameters and buffers by name; tensors in their memory become a `View`.
        copied: whether copies in other processes are described; then memory shared between processes is left out.
        built: objects of libraries as built, whose large values are left out until they change; None describes all.
    """

    def __init__(
        self,
        anchors: Mapping[int, str],
        tensors: Mapping[str, Tensor],
        *,
        copied: bool = False,
        built: AsBuilt | None = None,
    ) -> None:
        self.anchors, self._tensors, self._copied = anchors, tensors, copied
        #: whether what is large is left out, as data are
        self.is_small = False
        self.seen: dict[int, tuple[str, object]] = {}
        self.opaque: dict[str, object] = {}  #: what no file can hold, by path
        self.constants: dict[str, str] = {}  #: functions, classes and the like, by path
        self.compared: dict[str, object] = {}  #: those of them that are compared between snapshots, by path
        self.functions: set[str] = set()  #: those of them that are found again by their names, by path
        self.deep: dict[str, object] = {}  #: what was left out because it is nested too deep, by path
        self._depth = 0
        #: whether the object whose attributes are described is a library's
        self.is_in_library = False
        #: whether what no file can hold is watched there without a warning, as in a data set or a callable
        self.is_quiet = False
        self.held: dict[str, object] = {}  #: what is watched so, by path
        self.idle: dict[str, object] = {}  #: free locks, pools and the like, which have no state, by path
        self._built = built
        self.numbers: set[int] = set()  #: numbers that can be ids of objects met later
        self.as_built: dict[str, object] = {}  #: large values that were left out as unchanged, by path
        self.large: dict[str, object] = {}  #: what was left out because it is large, or shared

    def node(self, value: Any, path: str) -> Any:
        """Return the node of `value` at `path`."""
        kind = type(value)
        if kind in PLAIN:
            return ADDRESSES.describe(self, value, path) if self.is_address(value) else value
        if (name := self.anchors.get(id(value))) is not None:
            return Same(name)
        if (met := self.seen.get(id(value))) is not None:
            return Same(met[0])
        if (self.is_small and is_large(value)) or (self._copied and is_shared(value)):
            self.large[path] = value
            return LEFT_OUT.describe(self, value, path)
        if self.is_in_library and self._is_as_built(value, path):
            self.as_built[path] = value
            return LEFT_OUT.describe(self, value, path)
        if self._depth == DEEPEST:
            self.deep[path] = value
            return LEFT_OUT.describe(self, value, path)
        self._depth += 1
        try:
            return describer_of(kind)(self, value, path)
        finally:
            self._depth -= 1

    def _is_as_built(self, value: object, path: str) -> bool:
        """Return whether a large value in a library's object is as it was built."""
        if self._built is None or isinstance(value, np.memmap) or not is_large(value):
            return False
        digest = content_digest(value)
        return digest is not None and self._built.is_same(path, digest)

    def is_late(self, value: object) -> bool:
        """Return whether training has made a library's object with a `state_dict`."""
        return self._built is not None and self._built.is_late(value)

    def meet(self, value: object, path: str) -> None:
        """Record `value` at `path`, and keep it alive until the walk ends, so that no id is reused."""
        self.seen[id(value)] = path, value

    def met_first(self, values: Iterable[Any]) -> list[Any]:
        """Return `values` with those first that are described elsewhere, by their paths.

        Sets of objects iterate by address, which differs between attempts.
        """
        named = [(self.anchors.get(id(value)) or self.seen.get(id(value), ("",))[0], value) for value in values]
        met = sorted((pair for pair in named if pair[0]), key=operator.itemgetter(0))
        return [value for _, value in [*met, *(pair for pair in named if not pair[0])]]

    @contextmanager
    def without_large(self) -> Iterator[None]:
        """Leave out large values in the block."""
        before, self.is_small = self.is_small, True
        try:
            yield
        finally:
            self.is_small = before

    @contextmanager
    def inside(self, *, is_library: bool, is_quiet: bool = False) -> Iterator[None]:
        """Describe, in the block, attributes of an object of a library or of the user's."""
        before = self.is_in_library, self.is_quiet
        self.is_in_library, self.is_quiet = is_library, is_quiet
        try:
            yield
        finally:
            self.is_in_library, self.is_quiet = before

    def root_attributes(
        self, values: Mapping[str, Any], path: str, *, is_small: bool, is_ordered: bool = False
    ) -> dict[str, Any]:
        """Return the nodes of a root's attributes, by name unless `is_ordered`.

        If `is_small`, large values are left out.
        """
        self.is_small = is_small
        if is_ordered:
            return self.attributes(values, path)
        return dict(self.attributes({name: values[name] for name in sorted(values)}, path))

    def attributes(self, values: Mapping[str, Any], path: str) -> "OrderedDict[str, Any]":
        """Return the nodes of attributes in the order of `vars`, that of their setting."""
        nodes: OrderedDict[str, Any] = OrderedDict()
        for name, value in values.items():  # half the time that it takes to make one of pairs
            is_plain = type(value) in PLAIN and not self.is_address(value)
            nodes[name] = value if is_plain else self.node(value, step(path, name))
        return nodes

    def items(self, values: Any, path: str) -> Iterator[Any]:
        """Yield the nodes of the items of a sequence."""
        kinds = {*map(type, values)}
        if kinds <= PLAIN and not (int in kinds and self.has_address(values)):
            yield from values
        else:
            yield from (self.node(value, f"{path}/{index}") for index, value in enumerate(values))

    def is_described(self, kind: type) -> bool:
        """Return whether the nodes of objects of `kind` hold more than its name."""
        return kind_of(kind).is_described

    def is_address(self, value: Any) -> bool:
        """Return whether `value` is the `id` of an object, met before or in another part.

        Ids differ between attempts.
        """
        if type(value) is not int or value <= LOWEST_ADDRESS:
            return False
        is_known = value in self.anchors or value in self.seen
        if not is_known:
            self.numbers.add(value)
        return is_known

    def has_address(self, values: Collection[Any]) -> bool:
        """Return whether one of `values` is the `id` of an object, as in `is_address`."""
        if self.is_address(next(iter(values), None)):
            return True
        return not (self.anchors.keys().isdisjoint(values) and self.seen.keys().isdisjoint(values))

    def address_of(self, value: int) -> str:
        """Return the name or path of the object whose `id` is `value`."""
        return self.anchors.get(value) or self.seen[value][0]

    def base_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter or buffer in whose memory `tensor` lies."""
        return self._storages.get(tensor.untyped_storage().data_ptr()) if has_memory(tensor) else None

    @cached_property
    def _storages(self) -> dict[int, str]:
        return {
            tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size(): name  # sooner than by its storage
            for name, tensor in self._tensors.items()
            if has_memory(tensor)
        }

    def view(self, tensor: Tensor) -> View | None:
        """Return `tensor` as a view of a parameter's memory; None if it is not in any."""
        name = self.base_of(tensor)
        if name is None:
            return None
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        return _view(name, self._tensors[name], tensor.data_ptr(), tensor.shape, strides, tensor.dtype)

    def array_view(self, array: "np.ndarray[Any, Any]") -> View | None:
        """Return an array as a view of a parameter's memory; None if it is not in any."""
        owner = owner_of(array)
        address = owner.untyped_storage().data_ptr() if isinstance(owner, Tensor) else address_of(owner)
        name = self._storages.get(address) if array.size else None
        if name is None:
            return None
        try:
            dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        except (TypeError, ValueError):  # a dtype or a byte order that torch does not have
            return None
        return _view(name, self._tensors[name], address_of(array), array.shape, array.strides, dtype)

    def is_view_without_address(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is in a parameter's memory, on a device without addresses."""
        if tensor.device.type != "xla":
            return False
        return is_view_of_one(tensor, (other for other in self._tensors.values() if other.device.type == "xla"))

    @cached_property
    def sharded_weight(self) -> "DTensor | None":
        """A parameter that is sharded over the ranks; None if none is, or if they are gathered now."""
        return next(filter(is_distributed, self._tensors.values()), None)

    def weight_at(self, rows: Tensor) -> str | None:
        """Return the name of the parameter whose rows on this rank are `rows`, in the same memory."""
        return self._rows.get((start, rows.shape)) if (start := start_of(rows)) else None

    @cached_property
    def _rows(self) -> dict[tuple[int, torch.Size], str]:
        weights = {name: tensor for name, tensor in self._tensors.items() if is_distributed(tensor)}
        shards = ((name, row_shard_of(tensor)) for name, tensor in weights.items())
        return {(start_of(shard.rows), shard.rows.shape): name for name, shard in shards if shard is not None}


def _view(
    name: str, base: Tensor, address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> View | None:
    """Return the view at an address, with strides in bytes; None if `base` has no such elements."""
    offset, size = address - base.data_ptr(), dtype.itemsize
    start = base.data_ptr() - base.untyped_storage().data_ptr()
    if offset < 0 or min(strides, default=0) < 0 or any(number % size for number in (offset, *strides, start)):
        return None
    other = "" if dtype == base.dtype else str(dtype).removeprefix("torch.")
    return View(name, tuple(shape), tuple(stride // size for stride in strides), offset // size, other)
