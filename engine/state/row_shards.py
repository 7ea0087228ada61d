"""Row shards: one rank's rows of a tensor, joined and sharded for another number of ranks.

Rows are assigned to ranks as in `torch.chunk` and `fully_shard`: the same number to each rank, rounded up, until none
is left. So the last ranks may have fewer rows or none.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from midstride.engine.errors import NotExact
from midstride.engine.trees import is_state_leaf, map_leaves

if TYPE_CHECKING:  # seconds, which only sharded training is worth
    from torch.distributed.tensor import DTensor

__all__ = [
    "DISTRIBUTED",
    "RowShard",
    "distributed_tensor",
    "is_distributed",
    "join_rows",
    "reshard_rows",
    "row_shard_of",
    "shard_rows",
    "shards_of",
]


#: the class of distributed tensors, whose module may not be imported yet
DISTRIBUTED = "torch.distributed.tensor:DTensor"


class RowShard(NamedTuple):
    """The rows of a tensor that one rank has.

    Args:
        rows: a slice of the tensor along its first dimension.
        start: index of the first row.
        shape: shape of the whole tensor.
    """

    rows: Tensor
    start: int
    shape: tuple[int, ...]


def shard_rows(whole: Tensor, rank: int, size: int) -> RowShard:
    """Return the rows of `whole` for `rank` of `size` ranks, in the memory of `whole`.

    >>> [len(shard_rows(torch.ones(33, 2), rank, 2).rows) for rank in range(2)]
    [17, 16]
    """
    rows = len(whole)
    each = -(-rows // size)
    start = min(rank * each, rows)
    return RowShard(whole[start : start + each], start, tuple(whole.shape))


def join_rows(shards: Sequence[RowShard]) -> Tensor:
    """Return the whole tensor, given the shards of all ranks; of several replicas, the first.

    Raises:
        NotExact: rows are missing or duplicate.
    """
    whole, end = shards[0].shape[0], 0
    replicas: list[list[Tensor]] = []
    for shard in shards:
        if not replicas or (shard.start == 0 and end == whole):
            replicas.append([])
            end = 0
        if shard.start != end:
            raise NotExact(f"the ranks' shards of a tensor of {shard.shape} leave row {end} out, or hold it twice")
        replicas[-1].append(shard.rows)
        end += len(shard.rows)
    if end != whole:
        raise NotExact(f"of a tensor of {shards[0].shape} the last rank ends at row {end}")
    return torch.cat(replicas[0])


def reshard_rows(trees: Sequence[Any], rank: int, size: int) -> Any:
    """Return the tree for `rank` of `size` ranks from those of another world.

    Its shards are cut anew.
    """

    def resharded(*leaves: Any) -> Any:
        return shard_rows(join_rows(leaves), rank, size) if isinstance(leaves[0], RowShard) else leaves[0]

    return map_leaves(resharded, *trees, is_leaf=is_state_leaf)


def is_distributed(value: object) -> "TypeGuard[DTensor]":
    """Return whether `value` is a distributed tensor."""
    kind = type(value)
    return f"{kind.__module__}:{kind.__qualname__}" == DISTRIBUTED


def shards_of(tensor: "DTensor") -> tuple[int, int]:
    """Return the index of this rank's shard of `tensor`, and the number of shards."""
    over = tensor.device_mesh.ndim - 1  # of a mesh of two dimensions, the first is that of replicas
    return tensor.device_mesh.get_local_rank(over), tensor.device_mesh.size(over)


def row_shard_of(tensor: "DTensor") -> RowShard | None:
    """Return this rank's rows of `tensor`, in its memory; None if it is not sharded by rows."""
    *around, last = tensor.placements
    if not last.is_shard(0) or not all(placement.is_replicate() for placement in around):
        return None
    rank, size = shards_of(tensor)
    each = -(-len(tensor) // size)
    return RowShard(cast("DTensor", tensor.detach()).to_local(), min(rank * each, len(tensor)), tuple(tensor.shape))


def distributed_tensor(shard: RowShard, like: "DTensor") -> "DTensor":
    """Return a distributed tensor with `shard` as this rank's rows, placed as `like` is."""
    shape = torch.Size(shard.shape)
    stride = torch.empty(shape, device="meta").stride()
    rows = shard.rows.to(like.device)
    made: DTensor = type(like).from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return made
