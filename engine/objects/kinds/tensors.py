"""Tensors: on host or device, with gradients, in memory of weights, or sharded over ranks."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from midstride.engine.errors import NotExact
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.objects.restored_memory import RestoredMemory
from midstride.engine.state.object_nodes import Instance, Same, View, instances_in, kind_name, step
from midstride.engine.state.row_shards import (
    DISTRIBUTED,
    RowShard,
    distributed_tensor,
    is_distributed,
    join_rows,
    row_shard_of,
    shard_rows,
    shards_of,
)
from midstride.engine.state.tensors import other_kind

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = [
    "ShardedTensors",
    "Tensors",
    "Views",
    "has_memory",
    "mark_device_tensors",
    "place_device_tensors",
    "placed_tensors",
    "reshard_nodes",
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

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the tensor without its graph, or the view that it is of a weight."""
        walk.meet(value, path)
        if (view := walk.view(value)) is not None:
            return view
        plain = value.detach() if value.grad_fn is not None else value
        if other_kind(plain) is not None or walk.is_view_without_address(value):
            return OPAQUE.describe(walk, value, path)
        if plain.is_cpu and (value.grad_fn is not None or value.grad is None):
            return plain
        state: dict[str, Any] = {} if plain.is_cpu else {"on_device": True}
        return self.instance(value, value=plain, **state, **_gradient_of(walk, value, path))

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Fill a tensor in place, or return a new one in the memory that it shared."""
        if not isinstance(node, Instance):
            return _restored(restore, node, live, path, was_on_host=True)
        before = _gradient_before(live)
        was_on_host = "on_device" not in node.state
        target = _restored(restore, node.state["value"], live, path, was_on_host=was_on_host)
        return _restore_gradient(restore, node, target, before, path)


def _restored(restore: "GraphRestore", value: Tensor, live: Any, path: str, *, was_on_host: bool) -> Any:
    if restore.use(live, path, fits=restore.takes(live, value, was_on_host=was_on_host)):
        restore.memory.take(live, value)
        with torch.no_grad():
            live.detach().copy_(value)
        return live
    plain = value.detach()
    placed = restore.memory.place(plain, was_on_host=was_on_host)
    return restore.set(value if placed is plain and was_on_host else _leaf_like(value, placed), path)


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


def _restore_gradient(restore: "GraphRestore", node: Instance, target: Any, before: Tensor | None, path: str) -> Any:
    if "gradient" in node.state:
        gradient = restore.put(node.state["gradient"], MISSING if before is None else before, step(path, "grad"))
        if gradient is not before:
            target.grad = gradient
    return target


class Views(Kind):
    """Tensors in the memory of a parameter or buffer."""

    node_types = (View,)

    def restore(self, restore: "GraphRestore", node: View, live: Any, path: str) -> Any:
        """Return the view of the live parameter."""
        base: Any = restore.find(node.of)
        if not isinstance(base, Tensor):
            return restore.mark_stale(path, f"a view of {node.of}", live)
        view = base.detach().as_strided(node.shape, node.strides, base.storage_offset() + node.offset)
        if _is_same_view(live, view):
            return restore.set(live, path)
        return restore.set(view, path)


def _is_same_view(a: Any, b: Tensor) -> bool:
    alike = isinstance(a, Tensor) and (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
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
        before = _gradient_before(live)
        target = _restored_rows(restore, node, live, path)
        return target if path in restore.stale else _restore_gradient(restore, node, target, before, path)


def _restored_rows(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    rows: RowShard = node.state["rows"]
    own = row_shard_of(live) if is_distributed(live) else None
    if own is not None:  # the rows of all weights are there, too
        fits = _is_cut_alike(own, rows) and restore.weight_at(own.rows) is None
        fits = fits and restore.takes(own.rows, rows.rows, was_on_host=own.rows.is_cpu)
        if restore.use(live, path, fits=fits):
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
    return restore.set(made.requires_grad_(requires_grad), path)


def _is_cut_alike(own: RowShard | None, rows: RowShard) -> bool:
    return own is not None and (own.shape, own.start, len(own.rows)) == (rows.shape, rows.start, len(rows.rows))


def _restored_alias(restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
    base: Any = restore.find(node.state["of"].path)
    if not is_distributed(base):
        return restore.mark_stale(path, f"the memory of {node.state['of'].path}", live)
    if is_distributed(live) and _start(live) == _start(base) and live.shape == base.shape:
        return restore.set(live, path)
    return restore.set(base.detach(), path)


def _start(tensor: "DTensor") -> int:
    return cast("DTensor", tensor.detach()).to_local().data_ptr()


def reshard_nodes(trees: Sequence[Any], tensors: Iterable[object]) -> None:
    """Change nodes of sharded tensors in all old ranks' trees to this rank's rows.

    Args:
        trees: one for each old rank; all nodes of the first are changed.
        tensors: parameters of the module, placed as in this world.

    Raises:
        NotExact: a rank of the old world lacks one.
    """
    like = next((tensor for tensor in tensors if is_distributed(tensor)), None)
    found = [
        {path: node for path, node in instances_in(tree, ShardedTensors.form) if "rows" in node.state} for tree in trees
    ]
    if like is None or not found[0]:
        return
    rank, size = shards_of(like)
    for path, node in found[0].items():
        nodes = [each[path] for each in found if path in each]
        if len(nodes) < len(trees):
            raise NotExact(
                f"only some ranks of the snapshot hold {path.strip('/').replace('/', '.')}, a distributed tensor of "
                f"{node.state['rows'].shape}: it cannot be put together for {size} ranks. Resume with {len(trees)}."
            )
        rows = shard_rows(join_rows([each.state["rows"] for each in nodes]), rank, size)
        for each in nodes:
            each.state["rows"] = rows


def mark_device_tensors(tree: Any) -> Any:
    """Return `tree` with a node for each tensor on an accelerator; itself if it has none."""
    tensors = list(tensors_in(tree))
    marks = {id(tensor): _mark(tensor) for tensor in tensors if _is_on_device(tensor)}
    return copy.deepcopy(tree, {id(tensor): tensor for tensor in tensors} | marks) if marks else tree


def place_device_tensors(tree: Any, device: torch.device) -> Any:
    """Return `tree` with tensors on `device` in place of nodes; itself if it has none.

    Tensors that are on `device` already are not copied, as when a state is loaded in the process that returned it.
    """
    placed = placed_tensors(tree, device)
    return copy.deepcopy(tree, {id(tensor): tensor for tensor in tensors_in(tree)} | placed) if placed else tree


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
