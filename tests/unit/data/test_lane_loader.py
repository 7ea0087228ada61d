"""Loaders of runs in lanes: the lanes of any number of ranks read what as many ranks would."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from midstride.engine import CombinedLoader
from midstride.engine.config.options import TrainerOptions
from midstride.engine.data.resolve import LoaderResolver, LoaderSettings
from midstride.engine.lanes import Lanes, allowed_sizes
from midstride.engine.state.differences import differences
from midstride.engine.strategies.collective import SingleProcess
from midstride.engine.world import World

LANES = 4


class Noisy(Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(2)


def noisy(samples: list[Any]) -> Any:
    return torch.tensor([index for index, _ in samples]), torch.stack([x for _, x in samples]) + torch.rand(2)


class Backwards(Sampler[int]):
    """Another order in each epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 45

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(45, generator=torch.Generator().manual_seed(self.epoch)).tolist())


LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (lambda: DataLoader(Noisy(), 3, shuffle=True), {}),
    "random collate": (lambda: DataLoader(Noisy(), 3, collate_fn=noisy, drop_last=True), {"rng": "batch"}),
    "a sampler": (lambda: DataLoader(Noisy(), 3, sampler=Backwards()), {"limit_train_batches": 0.6}),
    "a batch sampler": (lambda: DataLoader(Noisy(), batch_sampler=[[i, i + 1] for i in range(0, 44, 2)]), {}),
    "workers": (lambda: DataLoader(Noisy(), 3, shuffle=True, num_workers=1), {"limit_train_batches": 3}),
    "two": (lambda: CombinedLoader({"a": DataLoader(Noisy(), 3), "b": DataLoader(Noisy(), 5)}, "max_size"), {}),
}


def resolver(name: str, world: World, lanes: Lanes | None) -> LoaderResolver:
    make, options = LOADERS[name]
    settings = LoaderSettings(world, TrainerOptions.model_validate(options), 5, lanes)
    loader = make()
    return LoaderResolver(
        settings, SingleProcess(), None, train=loader, evaluate=loader if name != "two" else loader.loaders
    )


def in_lanes(name: str, size: int, rank: int) -> LoaderResolver:
    lanes = Lanes(LANES, rank, size)
    return resolver(name, World(rank=lanes.own.start, size=LANES), lanes)


@pytest.mark.parametrize("name", LOADERS)
def test_a_lane_reads_what_a_rank_of_as_many_would(name: str) -> None:
    alone = [resolver(name, World(rank=lane, size=LANES), None) for lane in range(LANES)]
    training = [list(one.training().batches(1)) for one in alone]
    evaluated = [[list(feed.batches(0)) for feed in one.evaluation("validate")] for one in alone]
    for size in allowed_sizes(LANES):
        for rank in range(size):
            loaders = in_lanes(name, size, rank)
            read = list(loaders.training().batches(1))
            validated = [list(feed.batches(0)) for feed in loaders.evaluation("validate")]
            for lane in Lanes(LANES, rank, size).own:
                assert not differences([batch[lane] for batch in read], training[lane])
                own = [[batch[lane] for batch in feed if lane in batch] for feed in validated]
                assert not differences(own, evaluated[lane])


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "workers"])
def test_another_number_of_ranks_goes_on_from_any_batch(name: str) -> None:
    whole = in_lanes(name, 1, 0).training()
    walked, states = [], []
    for batch in whole.batches(2):
        walked.append(batch)
        states.append(whole.state_dict())
    for start in range(1, len(walked)):
        resumed = in_lanes(name, 2, 1).training()
        resumed.load_state_dict(states[start - 1])
        expected = [{lane: batch[lane] for lane in (2, 3)} for batch in walked[start:]]
        assert not differences(list(resumed.batches(2, start)), expected)
