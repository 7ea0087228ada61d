"""Row shards: one rank's rows of a tensor, found and joined for another number of ranks.

Rows are assigned to ranks as in `torch.chunk` and `fully_shard`: the same number to each rank, rounded up, until none
is left. So the last ranks may have fewer rows or none.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from midstride.engine.errors import NotExact

if TYPE_CHECKING:  # seconds, which only sharded training is worth
    from torch.distributed.tensor import DTensor

__all__ = [
    "DISTRIBUTED",
    "RowShard",
    "distributed_tensor",
    "find_rows",
    "is_distributed",
    "join_rows",
    "no_rows",
    "row_shard_of",
    "rows_of_rank",
    "shard_rows",
    "shards_of",
    "start_of",
    "whole_tensor",
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


def rows_of_rank(rows: int, rank: int, size: int) -> range:
    """Return the rows, of a tensor with `rows` of them, that `rank` of `size` ranks has.

    >>> [rows_of_rank(33, rank, 2) for rank in range(2)]
    [range(0, 17), range(17, 33)]
    """
    each = -(-rows // size)
    start = min(rank * each, rows)
    return range(start, min(start + each, rows))


def shard_rows(whole: Tensor, rank: int, size: int) -> RowShard:
    """Return the rows of `whole` for `rank` of `size` ranks, in the memory of `whole`."""
    own = rows_of_rank(len(whole), rank, size)
    return RowShard(whole[own.start : own.stop], own.start, tuple(whole.shape))


def find_rows(held: Sequence[range], wanted: range, whole: int) -> list[tuple[int, range]]:
    """Return the shards that have the rows `wanted`: their numbers, and the rows of each.

    Args:
        held: rows of each shard, in the order of ranks; of several replicas, the first counts.
        wanted: rows to be found.
        whole: rows of the whole tensor.

    Raises:
        NotExact: rows are missing or duplicate.
    """
    first: list[int] = []  # numbers of the shards of the first replica
    end, replicas = 0, 0
    for number, rows in enumerate(held):
        if not replicas or (rows.start == 0 and end == whole):
            replicas, end = replicas + 1, 0
        if rows.start != end:
            raise NotExact(f"the ranks' shards of a tensor of {whole} rows leave row {end} out, or hold it twice")
        if replicas == 1:
            first.append(number)
        end = rows.stop
    if end != whole:
        raise NotExact(f"of a tensor of {whole} rows the last rank ends at row {end}")
    parts = [(n, range(max(held[n].start, wanted.start), min(held[n].stop, wanted.stop))) for n in first]
    return [(number, rows) for number, rows in parts if rows]


def join_rows(shards: Sequence[RowShard]) -> Tensor:
    """Return the whole tensor, given the shards of all ranks; of several replicas, the first.

    Raises:
        NotExact: rows are missing or duplicate.
    """
    whole = shards[0].shape[0]
    held = [range(shard.start, shard.start + len(shard.rows)) for shard in shards]
    found = [shards[number].rows for number, _ in find_rows(held, range(whole), whole)]
    return torch.cat(found or [shards[0].rows])


def no_rows(shard: RowShard) -> RowShard:
    """Return the end of the same tensor, as ranks of other replicas than the first write it."""
    return RowShard(shard.rows[:0], shard.shape[0], shard.shape)


def whole_tensor(value: Any) -> Any:
    """Return the rows of a row shard that has all of them; other values unchanged."""
    return value.rows if isinstance(value, RowShard) else value


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


def start_of(rows: Tensor) -> int:
    """Return the address of a rank's rows; of no rows, that of the padding in their place."""
    return rows.data_ptr() if rows.numel() else rows.untyped_storage().data_ptr()


def distributed_tensor(shard: RowShard, like: "DTensor") -> "DTensor":
    """Return a distributed tensor with `shard` as this rank's rows, placed as `like` is."""
    shape = torch.Size(shard.shape)
    stride = torch.empty(shape, device="meta").stride()
    rows = shard.rows.to(like.device)
    made: DTensor = type(like).from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return made
