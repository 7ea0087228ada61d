"""Rows of tensors: sharded as `torch.chunk` does, and the same bits however often they are sharded anew."""

import pytest
import torch

from midstride.engine.errors import NotExact
from midstride.engine.state.row_shards import find_rows, join_rows, rows_of_rank, shard_rows


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 33])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_are_dealt_as_chunk_deals_them(rows: int, size: int) -> None:
    whole = torch.randn(rows, 3)
    shards = [shard_rows(whole, rank, size) for rank in range(size)]
    for shard, chunk in zip(shards, whole.chunk(size), strict=False):
        assert shard.rows.equal(chunk)
    assert join_rows(shards).equal(whole)
    assert join_rows([*shards, *shards]).equal(whole)  # of two replicas


@pytest.mark.parametrize("now", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("was", [1, 2, 3, 4])
def test_the_rows_of_any_rank_are_found_in_any_world(was: int, now: int) -> None:
    for rows in (0, 1, 2, 7):
        held = [rows_of_rank(rows, rank, was) for rank in range(was)]
        for rank in range(now):
            wanted = rows_of_rank(rows, rank, now)
            for replicas in (1, 2):
                found = find_rows(held * replicas, wanted, rows)
                assert [row for _, part in found for row in part] == [*wanted]
                assert all(part.start >= held[old].start and part.stop <= held[old].stop for old, part in found)


def test_row_shards_that_do_not_make_a_whole_are_refused() -> None:
    shards = [shard_rows(torch.randn(4, 2), rank, 2) for rank in range(2)]
    for wrong in (shards[:1], shards[1:], [*shards, shards[1]]):
        with pytest.raises(NotExact, match="row"):
            join_rows(wrong)
