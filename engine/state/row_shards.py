"""Pieces: tensors of which each rank has some rows, put together and cut anew.

Rows are dealt as `torch.chunk` deals them, and so as `fully_shard` does: every rank gets as many, rounded up, and what
is over at the end is missing there. A rank may have none.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from midstride.engine.errors import NotExact

__all__ = ["Piece", "cut", "join", "mapped", "recut"]


class Piece(NamedTuple):
    """What one rank has of a tensor.

    Args:
        rows: along its first dimension.
        start: number of the first of them.
        shape: of the whole.
    """

    rows: Tensor
    start: int
    shape: tuple[int, ...]


def cut(whole: Tensor, rank: int, size: int) -> Piece:
    """Return the piece that `rank` of `size` has of `whole`; it shares its memory.

    >>> [len(cut(torch.ones(33, 2), rank, 2).rows) for rank in range(2)]
    [17, 16]
    """
    rows = len(whole)
    each = -(-rows // size)
    start = min(rank * each, rows)
    return Piece(whole[start : start + each], start, tuple(whole.shape))


def join(pieces: Sequence[Piece]) -> Tensor:
    """Return the tensor that all ranks' pieces make.

    Raises:
        NotExact: rows are missing, or there twice.
    """
    end = 0
    for piece in pieces:
        if piece.start != end:
            raise NotExact(
                f"the ranks' pieces of a tensor of {piece.shape} leave row {end} to no rank, or to two of them"
            )
        end += len(piece.rows)
    if end != pieces[0].shape[0]:
        raise NotExact(f"of a tensor of {pieces[0].shape} the last rank ends at row {end}")
    return torch.cat([piece.rows for piece in pieces])


def mapped(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Return `tree` with what `replace` makes of its leaves."""
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, mapped(value, replace)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, replace) for value in tree)
    return replace(tree)


def recut(trees: Sequence[Any], rank: int, size: int) -> Any:
    """Return the tree of `rank` of `size`, given those of the ranks of another world; where they agree, the first's."""
    first = trees[0]
    if isinstance(first, Piece):
        return cut(join(trees), rank, size)
    if type(first) in (dict, OrderedDict):
        return type(first)((key, recut([tree[key] for tree in trees], rank, size)) for key in first)
    if type(first) in (list, tuple):
        return type(first)(recut(values, rank, size) for values in zip(*trees, strict=True))
    return first
