"""Distributed tensors, such as copies of sharded weights: a snapshot holds the rows of each rank."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from midstride.engine.errors import NotExact
from midstride.engine.objects.container_writers import Walk, instance_of, opaque_node
from midstride.engine.objects.containers import Restore
from midstride.engine.objects.plain_values import step
from midstride.engine.state.object_nodes import Instance, Same, instances_in
from midstride.engine.state.row_shards import (
    RowShard,
    distributed_tensor,
    is_distributed,
    join_rows,
    row_shard_of,
    shard_rows,
    shards_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["distributed_node", "fill_alias", "fill_rows", "reshard_nodes"]


def distributed_node(walk: Walk, value: Any, path: str) -> Any:
    """Describe a distributed tensor by this rank's rows, or by the name of the weight whose memory it shares."""
    shard, like = row_shard_of(value), walk.sharded_weight
    if shard is None or (like is not None and like.device_mesh != value.device_mesh):
        return opaque_node(walk, value, path)
    walk.meet(value, path)
    if (name := walk.weight_at(shard.rows)) is not None:
        return instance_of(value, "alias", of=Same(name))
    flags = {"parameter": isinstance(value, nn.Parameter), "requires_grad": value.is_leaf and value.requires_grad}
    node = instance_of(value, "rows", rows=shard, **{name: True for name, is_set in flags.items() if is_set})
    if value.is_leaf and value.grad is not None:
        return instance_of(value, "with gradient", value=node, gradient=walk.node(value.grad, step(path, "grad")))
    return node


def fill_rows(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a distributed tensor: in place, or as a new tensor placed as the module's weights are."""
    rows: RowShard = node.state["rows"]
    own = row_shard_of(live) if is_distributed(live) else None
    fits = own is not None and _is_cut_alike(own, rows) and restore.weight_at(own.rows) is None
    if own is not None:  # where it is, all weights' rows are
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


def fill_alias(restore: Restore, node: Instance, live: Any, path: str) -> Any:
    """Restore a distributed tensor that shares the memory of a weight."""
    base: Any = restore.find(node.state["of"].path)
    if not is_distributed(base):
        return restore.mark_stale(path, f"the memory of {node.state['of'].path}", live)
    if is_distributed(live) and _start(live) == _start(base) and live.shape == base.shape:
        return restore.set(live, path)
    return restore.set(base.detach(), path)


def _start(tensor: "DTensor") -> int:
    return cast("DTensor", tensor.detach()).to_local().data_ptr()


def reshard_nodes(trees: Sequence[Any], tensors: Iterable[object]) -> None:
    """Change nodes of distributed tensors in the trees of all old ranks to hold this rank's rows in the new world.

    Args:
        trees: one for each old rank; all nodes of the first are changed.
        tensors: parameters of the module, placed as in this world.

    Raises:
        NotExact: a rank of the old world lacks one.
    """
    like = next((tensor for tensor in tensors if is_distributed(tensor)), None)
    found = [dict(instances_in(tree, "rows")) for tree in trees]
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
