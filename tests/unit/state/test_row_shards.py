"""Rows of tensors: sharded as `torch.chunk` does, and the same bits however often they are sharded anew."""

from collections import OrderedDict

import pytest
import torch

from midstride.engine.errors import NotExact
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences
from midstride.engine.state.row_shards import RowShard, join_rows, reshard_rows, shard_rows


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 33])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_are_dealt_as_chunk_deals_them(rows: int, size: int) -> None:
    whole = torch.randn(rows, 3)
    shards = [shard_rows(whole, rank, size) for rank in range(size)]
    for shard, chunk in zip(shards, whole.chunk(size), strict=False):
        assert shard.rows.equal(chunk)
    assert join_rows(shards).equal(whole)
    assert join_rows([*shards, *shards]).equal(whole)  # of two replicas


def test_a_tree_is_cut_anew_for_any_number_of_ranks() -> None:
    whole = {"weight": torch.randn(7, 2), "empty": torch.randn(1)}

    def trees(size: int) -> list[OrderedDict[str, object]]:
        return [
            OrderedDict(state={0: {n: shard_rows(w, rank, size) for n, w in whole.items()}}, groups=[(1, "adam")])
            for rank in range(size)
        ]

    now = trees(3)
    for size in (2, 4, 1, 3):
        now = [reshard_rows(now, rank, size) for rank in range(size)]
        assert differences(now, trees(size)) == []


def test_row_shards_that_do_not_make_a_whole_are_refused() -> None:
    shards = [shard_rows(torch.randn(4, 2), rank, 2) for rank in range(2)]
    for wrong in (shards[:1], shards[1:], [*shards, shards[1]]):
        with pytest.raises(NotExact, match="row"):
            join_rows(wrong)


def test_a_piece_is_written_and_read() -> None:
    tree = {"module": {"weight": shard_rows(torch.randn(5, 2), 1, 2), "none": shard_rows(torch.randn(1), 1, 2)}}
    encoded = encode(tree)
    assert set(encoded.tensors) == {"module/weight", "module/none"}
    found = decode(encoded.document, encoded.tensors)
    assert type(found["module"]["weight"]) is RowShard
    assert differences(tree, found) == []
