"""The order of samples: a function, DistributedSampler's, and every sample once."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.data import DistributedSampler

from midstride.engine.data.order import BLOCK, InOrder, Shuffled, StridedOrder
from midstride.engine.data.permutation import LARGE, Feistel

worlds = some.tuples(some.integers(1, 200), some.integers(1, 7), some.integers(1, 9))  # samples, ranks, batch size
seeds = some.integers(0, 2**40)


def read(shard: StridedOrder, epoch: int = 0, start: int = 0) -> list[tuple[int, int]]:
    """Return position and index of every sample from batch `start` on."""
    shard.sequence.open(epoch, resumed=start > 0)
    fetches = shard.requests(0, start)
    return [(f.first + number * f.stride, index) for f in fetches for number, index in enumerate(f.indices)]


@given(worlds, seeds, some.integers(0, 5), some.booleans(), some.booleans())
def test_training_order_is_that_of_distributed_sampler(
    world: tuple[int, int, int], seed: int, epoch: int, shuffle: bool, drop: bool
) -> None:
    samples, size, batch = world
    sequence = Shuffled(samples, seed) if shuffle else InOrder(samples)
    for rank in range(size):
        shard = StridedOrder(sequence, batch, rank=rank, size=size, rest="dropped" if drop else "padded")
        sampler = DistributedSampler(range(samples), size, rank, shuffle=shuffle, seed=seed, drop_last=drop)
        sampler.set_epoch(epoch)
        assert [index for _, index in read(shard, epoch)] == list(sampler)
        if samples >= size or not drop:  # else its length is one too many
            assert shard.rank_samples() == len(sampler)


@given(worlds, seeds)
def test_every_sample_is_trained_on_and_only_the_end_is_padded(world: tuple[int, int, int], seed: int) -> None:
    samples, size, batch = world
    shards = [StridedOrder(Shuffled(samples, seed), batch, rank=rank, size=size) for rank in range(size)]
    positions = dict(chain.from_iterable(read(shard, 3) for shard in shards))
    assert sorted(positions) == list(range(len(positions)))  # global positions, without holes
    assert sorted(positions[position] for position in range(samples)) == list(range(samples))
    assert len(positions) - samples < size
    assert len({len(shard) for shard in shards}) == 1


@given(worlds)
def test_every_sample_is_evaluated_once(world: tuple[int, int, int]) -> None:
    samples, size, batch = world
    shards = [StridedOrder(InOrder(samples), batch, rank=rank, size=size, rest="kept") for rank in range(size)]
    seen = Counter(index for shard in shards for _, index in read(shard))
    assert seen == Counter(range(samples))
    assert max(len(shard) for shard in shards) == len(shards[0])


@given(some.integers(1, 300), some.lists(some.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=4), some.data())
def test_another_number_of_ranks_reads_the_same_global_batches(
    samples: int, sizes: list[int], data: some.DataObject
) -> None:
    """Twelve samples a global batch, by one world after the other: each position has the sample it would have had."""
    expected = dict(read(StridedOrder(Shuffled(samples, 5), 12), 1))
    batches, found, start = -(-samples // 12), dict[int, int](), 0
    for size in sizes:
        end = batches if size is sizes[-1] else data.draw(some.integers(start, batches))
        for rank in range(size):
            shard = StridedOrder(Shuffled(samples, 5), 12 // size, rank=rank, size=size)
            assert len(shard) == batches
            for position, index in read(shard, 1, start):
                if position < 12 * end:
                    assert found.setdefault(position, index) == index
        start = end
    for position, index in expected.items():
        if position in found:
            assert found[position] == index
    assert {position for position in found if position < samples} == set(range(samples))


@pytest.mark.parametrize(("drop_last", "batches"), [(True, 2), (False, 3)])
def test_a_batch_that_is_not_full_is_dropped_when_asked(drop_last: bool, batches: int) -> None:
    assert len(StridedOrder(InOrder(11), 4, drop_last)) == batches


@given(some.integers(1, 5000), seeds)
def test_a_computed_permutation_is_one(samples: int, seed: int) -> None:
    computed = Feistel(samples, seed)(np.arange(samples))
    assert sorted(computed.tolist()) == list(range(samples))


def test_a_computed_permutation_looks_drawn() -> None:
    samples = 100_000
    orders = [Feistel(samples, seed)(np.arange(samples)) for seed in range(20)]
    neighbours = [abs(np.corrcoef(order[:-1], order[1:])[0, 1]) for order in orders]
    assert np.mean(neighbours) < 3 / np.sqrt(samples)
    fixed = [int((order == np.arange(samples)).sum()) for order in orders]
    assert 0 < np.mean(fixed) < 3  # one is expected
    assert len({order[0] for order in orders}) == len(orders)


def test_a_huge_epoch_is_computed_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted, not timed: far into an epoch costs what its start costs."""
    samples, asked = 1_000_000_000, list[int]()
    whole = Feistel.__call__

    def counted(self: Feistel, positions: np.ndarray) -> np.ndarray:
        asked.append(len(positions))
        return whole(self, positions)

    monkeypatch.setattr(Feistel, "__call__", counted)
    shard = StridedOrder(Shuffled(samples, 3), 32, rank=1, size=4)
    assert samples > LARGE
    costs = []
    for start in (10, 1_000_000):
        asked.clear()
        shard.sequence.open(0, resumed=True)
        next(shard.requests(0, start))
        costs.append(list(asked))
    assert costs[0] == costs[1] == [BLOCK]
