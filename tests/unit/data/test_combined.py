"""Several loaders at once: each mode beside its hand-written loop, from any batch, of any lengths."""

from itertools import cycle, islice, zip_longest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from midstride.engine import CombinedLoader, Trainer, TrainingModule
from midstride.engine.data.combined import CombinedResumableLoader, Mode
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LoaderResolver, LoaderSettings
from midstride.engine.errors import UserError
from midstride.engine.seeds import mix

SEED = 7
MODES: tuple[Mode, ...] = ("min_size", "max_size_cycle", "max_size", "sequential")


class Numbers(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Count(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(range(self.samples))


def loaders_of(trainer: Trainer, module: Any, **given: Any) -> LoaderResolver:
    settings = LoaderSettings(trainer.strategy.data_world, trainer.options, trainer.settings.seed)
    return LoaderResolver(settings, trainer.strategy.collective, module, **given)


def feed_of(loaders: Any, **options: Any) -> ResumableLoader:
    trainer = Trainer(max_epochs=1, seed=SEED, enable_progress_bar=False, **options)
    return loaders_of(trainer, None, train=loaders).training()


def read(feed: ResumableLoader, epoch: int, start: int = 0) -> list[Any]:
    return [plain(batch) for batch in feed.batches(epoch, start)]


def plain(batch: Any) -> Any:
    """Return a nest of batches as lists of numbers, to compare with `==`."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch.tolist() if isinstance(batch, Tensor) else [plain(part) for part in batch] if batch else batch


def one_pass(number: int, samples: int, batch_size: int, lap: int) -> list[list[int]]:
    """Return one pass over loader `number`, by DistributedSampler: the first has the run's seed, others their own."""
    data = Numbers(samples)
    sampler: Any = DistributedSampler(data, 1, 0, seed=mix(SEED, number) % (1 << 32) if number else SEED)
    sampler.set_epoch(lap)
    return [batch.tolist() for batch in DataLoader(data, batch_size, sampler=sampler)]


def by_hand(mode: Mode, sizes: list[tuple[int, int]], epoch: int) -> list[Any]:
    """Return what a hand-written loop reads in `epoch`."""
    lengths = [-(-samples // batch_size) for samples, batch_size in sizes]
    longest = max(lengths)
    if mode == "max_size_cycle":
        rows = []
        for number, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
            laps = -(-longest // length)
            row = [batch for lap in range(laps) for batch in one_pass(number, *size, epoch * laps + lap)]
            rows.append(row[:longest])
        return [list(row) for row in zip(*rows, strict=True)]
    passes = [one_pass(number, *size, epoch) for number, size in enumerate(sizes)]
    if mode == "sequential":
        return [batch for one in passes for batch in one]
    return [list(row) for row in (zip_longest(*passes) if mode == "max_size" else zip(*passes, strict=False))]


@given(
    mode=st.sampled_from(MODES),
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=3),
    epoch=st.integers(0, 2),
    share=st.floats(0, 1),
)
def test_every_mode_is_its_hand_written_loop_from_any_place(
    mode: Mode, sizes: list[tuple[int, int]], epoch: int, share: float
) -> None:
    loaders = [DataLoader(Numbers(samples), batch_size, shuffle=True) for samples, batch_size in sizes]
    expected = by_hand(mode, sizes, epoch)
    feed = feed_of(CombinedLoader(loaders, mode))
    assert len(feed) == len(expected)
    start = int(share * len(expected))
    assert read(feed, epoch, start) == expected[start:]


@given(
    mode=st.sampled_from(MODES),
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.booleans()), min_size=2, max_size=3),
    deaths=st.lists(st.integers(0, 30), max_size=3),
    limit=st.sampled_from([1.0, 3]),
)
def test_unknown_lengths_end_where_known_ones_would(
    mode: Mode, sizes: list[tuple[int, int, bool]], deaths: list[int], limit: float
) -> None:
    def make(known: bool) -> ResumableLoader:
        loaders = [
            DataLoader(Numbers(samples) if known or sized else Count(samples), batch_size)
            for samples, batch_size, sized in sizes
        ]
        return feed_of(CombinedLoader(loaders, mode), limit_train_batches=limit)

    expected = read(make(True), 0)
    feed, found = make(False), list[Any]()
    for death in sorted(deaths):
        if not len(found) < death < len(expected):
            continue
        batches = feed.batches(0, len(found))
        found += [plain(batch) for batch in islice(batches, death - len(found))]
        state, feed = feed.state_dict(), make(False)
        feed.load_state_dict(state)
    assert found + read(feed, 0, len(found)) == expected
    assert feed.at_end
    # the next epoch is a new pass over every loader
    assert read(feed, 1) == expected


def test_a_batch_is_a_nest_like_the_loaders() -> None:
    a, b, c = (DataLoader(Numbers(samples), 2) for samples in (4, 2, 3))
    first, second = read(feed_of({"a": a, "b": [b, (c,)]}), 0)
    assert first == {"a": [0, 1], "b": [[0, 1], [[0, 1]]]}
    assert second == {"a": [2, 3], "b": [[0, 1], [[2]]]}


def test_a_nest_cycles_in_training_and_runs_once_in_evaluation() -> None:
    class Module(TrainingModule):
        def val_dataloader(self) -> Any:
            return {"a": DataLoader(Numbers(4), 2), "b": [DataLoader(Numbers(2), 2), DataLoader(Count(3), 2)]}

    feeds = loaders_of(Trainer(max_epochs=1, enable_progress_bar=False), Module()).evaluation("validate")
    assert [read(feed, 0) for feed in feeds] == [[[0, 1], [2, 3]], [[0, 1]], [[0, 1], [2]]]


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_side_by_side_is_one_loader(mode: Mode) -> None:
    class Module(TrainingModule):
        def val_dataloader(self) -> Any:
            return CombinedLoader([DataLoader(Numbers(4), 2), DataLoader(Count(2), 2)], mode)

    feeds = loaders_of(Trainer(max_epochs=1, enable_progress_bar=False), Module()).evaluation("validate")
    assert len(feeds) == (2 if mode == "sequential" else 1)
    assert isinstance(feeds[0], CombinedResumableLoader) == (mode != "sequential")
    if mode == "max_size_cycle":
        rows = zip([[0, 1], [2, 3]], cycle([[0, 1]]), strict=False)
        assert read(feeds[0], 0) == [list(row) for row in rows]


def test_an_unknown_mode_lists_the_known() -> None:
    with pytest.raises(UserError, match="no mode 'longest': choose one of min_size, max_size_cycle"):
        CombinedLoader([], "longest")  # type: ignore[arg-type]


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(UserError, match="empty dict"):
        feed_of(CombinedLoader({}))


def test_a_share_of_unknown_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"0\.5 is a share .* Give a number of batches"):
        feed_of([DataLoader(Numbers(4), 2), DataLoader(Count(4), 2)], limit_train_batches=0.5)
