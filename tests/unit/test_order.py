"""The order of samples: a function, DistributedSampler's, and every sample once."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.data import DistributedSampler

from midstride.engine.data.order import EvaluationOrder, TrainingOrder

worlds = some.tuples(some.integers(1, 200), some.integers(1, 7), some.integers(1, 9))  # samples, ranks, batch size


@given(worlds, some.integers(0, 2**40), some.integers(0, 5), some.booleans())
def test_training_order_is_that_of_distributed_sampler(
    world: tuple[int, int, int], seed: int, epoch: int, shuffle: bool
) -> None:
    samples, size, batch = world
    for rank in range(size):
        order = TrainingOrder(samples, batch, rank=rank, size=size, seed=seed, shuffle=shuffle)
        sampler = DistributedSampler(range(samples), size, rank, shuffle=shuffle, seed=seed)
        sampler.set_epoch(epoch)
        assert order.indices(epoch) == list(sampler)
        assert order.rank_samples() == len(sampler)


@given(worlds, some.integers(0, 2**40))
def test_every_sample_is_trained_on_and_only_the_end_is_padded(world: tuple[int, int, int], seed: int) -> None:
    samples, size, batch = world
    orders = [TrainingOrder(samples, batch, rank=rank, size=size, seed=seed) for rank in range(size)]
    places: dict[int, int] = {}
    for order in orders:
        for _, first, stride, indices in order.fetches(0, 3, 0):
            places |= {first + number * stride: index for number, index in enumerate(indices)}
    assert sorted(places) == list(range(len(places)))  # global positions, without holes
    assert sorted(places[place] for place in range(samples)) == list(range(samples))
    assert len(places) - samples < size
    assert len({len(order) for order in orders}) == 1


@given(worlds)
def test_every_sample_is_evaluated_once(world: tuple[int, int, int]) -> None:
    samples, size, batch = world
    orders = [EvaluationOrder(samples, batch, rank=rank, size=size) for rank in range(size)]
    seen = Counter(chain.from_iterable(indices for order in orders for _, _, _, indices in order.fetches(0, 0, 0)))
    assert seen == Counter(range(samples))


@given(worlds, some.data())
def test_a_pass_that_starts_in_the_middle_is_the_end_of_the_whole_one(
    world: tuple[int, int, int], data: some.DataObject
) -> None:
    samples, size, batch = world
    order = TrainingOrder(samples, batch, rank=size - 1, size=size, seed=1)
    start = data.draw(some.integers(0, len(order)))
    assert list(order.fetches(9, 2, 0))[start:] == list(order.fetches(9, 2, start))


@pytest.mark.parametrize(("drop_last", "batches"), [(True, 2), (False, 3)])
def test_a_batch_that_is_not_full_is_dropped_when_asked(drop_last: bool, batches: int) -> None:
    assert len(TrainingOrder(11, 4, drop_last)) == batches
