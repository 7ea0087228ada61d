"""Tensors: on host or device, with gradients, in memory of weights, or sharded over ranks."""

import copy
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.objects.restored_memory import RestoredMemory
from midstride.engine.state.dtypes import torch_dtype
from midstride.engine.state.object_nodes import Instance, Same, View, instances_in, kind_name, step
from midstride.engine.state.row_shards import (
    DISTRIBUTED,
    RowShard,
    distributed_tensor,
    is_distributed,
    row_shard_of,
    start_of,
)
from midstride.engine.state.tensors import other_kind
from midstride.engine.state.torch_internals import flipped

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = [
    "FlippedTensors",
    "ShardedTensors",
    "Tensors",
    "Views",
    "has_memory",
    "in_memory_of",
    "mark_device_tensors",
    "place_device_tensors",
    "placed_tensors",
    "tensors_in",
]


def has_memory(tensor: Tensor) -> bool:
    """Return whether `tensor` is strided and has an address, unlike XLA tensors."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
        return False
    return bool(tensor.numel()) and (tensor.is_cpu or tensor.device.type != "xla")


class Tensors(Kind):
    """Tensors; on an accelerator or with a gradient, the node is an instance."""

    form = "tensor"
    types = node_types = (Tensor, nn.Parameter, nn.Buffer)

    def fills(self, value: Any) -> bool:
        """Return whether the tensor is dense."""
        return bool(value.layout == torch.strided)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the tensor without its graph, or the view that it is of a weight."""
        walk.meet(value, path)
        if value.layout == torch.strided and (value.is_neg() or value.is_conj()):
            return _FLIPPED.describe(walk, value, path)
        if (view := walk.view(value)) is not None:
            return view
        plain = value.detach() if value.grad_fn is not None else value
        if other_kind(plain) is not None or walk.is_view_without_address(value):
            return OPAQUE.describe(walk, value, path)
        own = _own_attributes(value)
        if plain.is_cpu and not own and (value.grad_fn is not None or value.grad is None):
            return plain
        state: dict[str, Any] = {} if plain.is_cpu else {"on_device": True}
        if own:
            state["attributes"] = walk.attributes(own, path)
        return self.instance(value, value=plain, **state, **_gradient_of(walk, value, path))

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill a tensor in place, or return a new one in the memory that it shared."""
        before, own = _gradient_before(live), _own_attributes(live)
        state = node.state if isinstance(node, Instance) else {"value": node}
        target = _restored(restore, state["value"], live, path, was_on_host="on_device" not in state)
        nodes = state.get("attributes", {})
        for name, part in nodes.items():
            if (after := restore.value(part, own.get(name, MISSING), step(path, name))) is not MISSING:
                setattr(target, name, after)
        for name in _own_attributes(target).keys() - nodes.keys():  # which training has deleted
            if not restore.change.adds(path, name):
                delattr(target, name)
        return _restore_gradient(restore, node, target, before, path)


def _own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that user code has set on a tensor."""
    own = vars(value) if isinstance(value, Tensor) else {}
    return {name: one for name, one in own.items() if not name.startswith("_")}


def _restored(restore: "GraphRestore", value: Tensor, live: Any, path: str, *, was_on_host: bool) -> Any:
    if restore.claim(live, path, fits=restore.takes(live, value, was_on_host=was_on_host)) and _fill(
        restore, live, value
    ):
        restore.memory.take(live, value)
        if live.is_leaf and live.requires_grad != value.requires_grad:
            live.requires_grad_(value.requires_grad)
        return live
    plain = value.detach()
    placed = restore.memory.place(plain, was_on_host=was_on_host)
    return restore.record(value if placed is plain and was_on_host else _leaf_like(value, placed), path)


def _fill(restore: "GraphRestore", live: Tensor, value: Tensor) -> bool:
    """Fill `live`; return False if it lies in an array that was filled with other values."""
    if restore.arrays.holds(live):
        return restore.arrays.fill(live, value)
    live.detach().copy_(value)
    return True


def _leaf_like(value: Tensor, placed: Tensor) -> Tensor:
    """Return `placed` as a leaf of the same class and `requires_grad` as `value`."""
    if type(value) is nn.Parameter:
        return nn.Parameter(placed, requires_grad=value.requires_grad)
    return placed.requires_grad_(value.requires_grad)


def _gradient_of(walk: "GraphWalk", value: Any, path: str) -> dict[str, Any]:
    """Return {"gradient": node} of a leaf that has a gradient, else {}."""
    has_one = value.is_leaf and value.grad is not None
    return {"gradient": walk.node(value.grad, step(path, "grad"))} if has_one else {}


def _gradient_before(live: Any) -> Tensor | None:
    return live.grad if isinstance(live, Tensor) and live.is_leaf else None


def _restore_gradient(restore: "GraphRestore", node: Any, target: Any, before: Tensor | None, path: str) -> Any:
    gradient = None
    if isinstance(node, Instance) and "gradient" in node.state:
        gradient = restore.value(node.state["gradient"], MISSING if before is None else before, step(path, "grad"))
    if gradient is not before and gradient is not MISSING:
        target.grad = gradient
    return target


class FlippedTensors(Kind):
    """Conjugate or negative views, in the memory of another tensor."""

    form = "flipped tensor"

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of the tensor in memory, and which view it is."""
        flips = dict.fromkeys(_flips_of(value), True)
        return self.instance(value, of=walk.node(_in_memory(value), step(path, "of")), **flips)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the view of the restored tensor; the live one if that was filled in place."""
        flips = [name for name in _FLIPS if node.state.get(name)]
        is_one = isinstance(live, Tensor) and live.layout == torch.strided and _flips_of(live) == flips
        before = _in_memory(live) if is_one else MISSING
        after = restore.value(node.state["of"], before, step(path, "of"))
        if not isinstance(after, Tensor):
            return restore.mark_stale(path, node.kind, live)
        if after is before:
            return restore.record(live, path)
        for name in flips:
            after = flipped(after, name)
        return restore.record(after, path)


#: views that differ from their memory by a bit of the tensor
_FLIPS = ("conj", "neg")


def _flips_of(value: Tensor) -> list[str]:
    return [name for name in _FLIPS if getattr(value, f"is_{name}")()]


def _in_memory(value: Tensor) -> Tensor:
    """Return the tensor in memory that `value` shows, conjugate or negative."""
    for name in _flips_of(value):
        value = flipped(value, name)
    return value.detach()


_FLIPPED = FlippedTensors()


class Views(Kind):
    """Tensors in the memory of a parameter or buffer."""

    node_types = (View,)

    def restore(self, restore: "GraphRestore", node: View, live: Any, path: str) -> Any:
        """Return the view of the live parameter."""
        base: Any = restore.find(node.of)
        if not isinstance(base, Tensor):
            return restore.mark_stale(path, f"a view of {node.of}", live)
        view = in_memory_of(base, node)
        if _is_same_view(live, view):
            return restore.record(live, path)
        return restore.record(view, path)


def in_memory_of(base: Tensor, node: View) -> Tensor:
    """Return the view of the tensor `base` that `node` describes.

    Raises:
        RuntimeError: it is larger than that memory.
    """
    if not node.dtype:
        return base.detach().as_strided(node.shape, node.strides, base.storage_offset() + node.offset)
    whole = torch.empty(0, dtype=torch_dtype(node.dtype), device=base.device).set_(base.untyped_storage())
    start = int(base.storage_offset()) * base.dtype.itemsize // whole.dtype.itemsize
    return whole.as_strided(node.shape, node.strides, start + node.offset)


def _is_same_view(a: Any, b: Tensor) -> bool:
    alike = isinstance(a, Tensor) and (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
    alike = alike and not _flips_of(a)
    return alike and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


class ShardedTensors(Kind):
    """Tensors sharded over the ranks, such as copies of sharded weights.

    Each rank keeps its rows.
    """

    form = "sharded tensor"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is torch's DTensor, whose module takes seconds to load."""
        return kind_name(kind) == DISTRIBUTED

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return this rank's rows, or the name of the weight whose memory the tensor shares."""
        shard, like = row_shard_of(value), walk.sharded_weight
        if shard is None or (like is not None and like.device_mesh != value.device_mesh):
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        if (name := walk.weight_at(shard.rows)) is not None:
            return self.instance(value, of=Same(name))
        flags = {"parameter": isinstance(value, nn.Parameter), "requires_grad": value.is_leaf and value.requires_grad}
        state = {name: True for name, is_set in flags.items() if is_set}
        return self.instance(value, rows=shard, **state, **_gradient_of(walk, value, path))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Fill a tensor in place, or return a new one that is placed as the module's weights are."""
        if "of" in node.state:
            return _restored_alias(restore, node, live, path)
        before, whole = _gradient_before(live), node.state["rows"]
        if isinstance(whole, Tensor):  # this strategy does not shard
            restore.mark_changed()
            requires_grad = node.state.get("requires_grad", False)
            value = nn.Parameter(whole, requires_grad) if node.state.get("parameter") else whole.detach()
            value.requires_grad_(requires_grad)
            target = _restored(restore, value, live, path, was_on_host=restore.memory.device.type == "cpu")
        else:
            target = _restored_rows(restore, node, live, path)
        return target if path in restore.stale else _restore_gradient(restore, node, target, before, path)


def _restored_rows(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    rows: RowShard = node.state["rows"]
    own = row_shard_of(live) if is_distributed(live) else None
    if own is not None:  # the rows of all weights are there, too
        fits = _is_cut_alike(own, rows) and restore.weight_at(own.rows) is None
        fits = fits and restore.takes(own.rows, rows.rows, was_on_host=own.rows.is_cpu)
        if restore.claim(live, path, fits=fits):
            restore.memory.take(own.rows, rows.rows)
            own.rows.copy_(rows.rows)
            return live
    like = restore.sharded_weight
    made: Any = None if like is None else distributed_tensor(rows, like)
    if made is None or not _is_cut_alike(row_shard_of(made), rows):
        return restore.mark_stale(path, node.kind, live)
    requires_grad = node.state.get("requires_grad", False)
    if node.state.get("parameter"):
        made = nn.Parameter(made, requires_grad=requires_grad)
    return restore.record(made.requires_grad_(requires_grad), path)


def _is_cut_alike(own: RowShard | None, rows: RowShard) -> bool:
    return own is not None and (own.shape, own.start, len(own.rows)) == (rows.shape, rows.start, len(rows.rows))


def _restored_alias(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    base: Any = restore.find(node.state["of"].path)
    if not isinstance(base, Tensor):
        return restore.mark_stale(path, f"the memory of {node.state['of'].path}", live)
    if not is_distributed(base):
        restore.mark_changed()
    if isinstance(live, Tensor) and _start(live) == _start(base) and live.shape == base.shape:
        return restore.record(live, path)
    return restore.record(base.detach(), path)


def _start(tensor: Tensor) -> int:
    return start_of(cast("DTensor", tensor.detach()).to_local() if is_distributed(tensor) else tensor)


def mark_device_tensors(tree: Any) -> Any:
    """Return `tree` with a node for each tensor on an accelerator; itself if it has none."""
    tensors = list(tensors_in(tree))
    marks = {id(tensor): _mark(tensor) for tensor in tensors if _is_on_device(tensor)}
    return copy.deepcopy(tree, {id(tensor): tensor for tensor in tensors} | marks) if marks else tree


def place_device_tensors(tree: Any, device: torch.device) -> Any:
    """Return a copy of `tree` with tensors on `device` in place of nodes.

    User code may empty the copy, as by `pop`, and `tree` is compared afterwards. Tensors that are on `device` already
    are not copied, as when a state is loaded in the process that returned it.
    """
    return copy.deepcopy(tree, {id(tensor): tensor for tensor in tensors_in(tree)} | placed_tensors(tree, device))


def placed_tensors(tree: Any, device: torch.device) -> dict[int, Any]:
    """Return tensors on `device` by the ids of their nodes, as a memo of `copy.deepcopy`."""
    memory, placed = RestoredMemory(device), dict[int, Any]()
    for _, node in instances_in(tree, Tensors.form):
        value: Tensor = node.state["value"]
        if id(node) not in placed:
            placed[id(node)] = _leaf_like(value, memory.place(value.detach(), was_on_host=False))
    return placed


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree of state, skipping lists of plain numbers.

    Such as the state of `random`.
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, Instance)):
        for value in (tree.state if isinstance(tree, Instance) else tree).values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple, deque)) and any(type(item) not in (int, float, str) for item in tree):
        for value in tree:
            yield from tensors_in(value)


def _is_on_device(tensor: Tensor) -> bool:
    """Return whether `tensor` is on an accelerator and can be written.

    Others are refused later.
    """
    return tensor.device.type != "cpu" and tensor.grad_fn is None and other_kind(tensor) is None


def _mark(tensor: Tensor) -> Instance:
    return Instance(Tensors.form, kind_name(type(tensor)), {"value": tensor, "on_device": True})
