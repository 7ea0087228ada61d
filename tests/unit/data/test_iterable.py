"""Iterable data sets: they go on where they were."""

import gc
import logging
import multiprocessing
import random
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.line_streams import READ, Drawn, Lines, Stateful, after, feed_of, resumed
from support.nets import Net
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from midstride.engine import Trainer
from midstride.engine.config.options import TrainerOptions
from midstride.engine.data.iterable.shard import STATE_BYTES
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LoaderSettings, training_reader
from midstride.engine.errors import NotExact, UserCodeError
from midstride.engine.world import World

REST = [[12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.parametrize("kind", [Stateful, Drawn])
def test_a_stateful_stream_repeats_one_batch_to_compare_it(kind: type[Lines]) -> None:
    assert resumed(kind(), after(kind(), 3), 3) == REST
    assert list(range(8, 20)) == READ


class Skipping(Drawn):
    """Leaves out what its sampler gives third."""

    def __next__(self) -> int:
        number = super().__next__()
        return super().__next__() if number % 3 == 2 else number


def test_skipped_indices_of_a_sampler_are_no_resume_point(caplog: pytest.LogCaptureFixture) -> None:
    state = after(Skipping(), 2)
    assert state["states"] == {}
    assert resumed(Skipping(), state, 2) == [[12, 13, 15, 16], [18, 19]]
    assert "does not restore" not in caplog.text


class Rotated(Drawn):
    """Told the epoch, as is its sampler."""

    epoch = 0

    def __init__(self) -> None:
        super().__init__(4)
        self.sampler: Any = DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __next__(self) -> Any:
        return 10 * self.epoch + super().__next__()


def test_a_stream_and_its_sampler_are_told_the_epoch() -> None:
    feed, sampler = feed_of(Rotated()), Rotated().sampler
    for epoch in (0, 1, 5):
        sampler.set_epoch(epoch)
        assert [batch.tolist() for batch in feed.batches(epoch)] == [[10 * epoch + number for number in sampler]]


def test_a_generator_is_read_again_and_that_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert resumed(Lines(), after(Lines(), 3), 3) == REST
    assert list(range(20)) == READ
    (message,) = [record.getMessage() for record in caplog.records if "again to reach its" in record.getMessage()]
    assert message.startswith("reading 3 batches of the training loader over Lines")


NOISE = random.Random(3)


class Noisy(Lines):
    """Draws from a global, which training may draw from as well."""

    def __iter__(self) -> Iterator[int]:
        yield from (number + 100 * NOISE.randrange(9) for number in super().__iter__())


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_generators_that_others_use_as_they_were(workers: int) -> None:
    before = NOISE.getstate()
    read = []
    for batch in feed_of(Noisy(), num_workers=workers).batches(0):
        assert NOISE.getstate() == before
        read += batch.tolist()
    assert {number // 100 for number in read} > {0, 1}


def test_a_large_state_travels_with_some_batches_only() -> None:
    class Heavy(Stateful):
        weight = 2 * STATE_BYTES

    state = after(Heavy(), 3)
    assert [(note["batch"], note["due"]) for note in state["states"].values()] == [(1, 4)]
    assert resumed(Heavy(), state, 3) == REST
    assert list(range(4, 20)) == READ


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    shards=st.integers(0, 7),
    drop_last=st.booleans(),
    share=st.floats(0, 1),
)
def test_shards_are_dealt_in_turn_and_left_out_where_they_ended(
    samples: int, batch_size: int, shards: int, drop_last: bool, share: float
) -> None:
    numbers = [list(range(shard, samples, max(1, shards))) for shard in range(max(1, shards))]
    piles = [[own[i : i + batch_size] for i in range(0, len(own), batch_size)] for own in numbers]
    piles = [[batch for batch in pile if len(batch) == batch_size or not drop_last] for pile in piles]
    expected = [pile[turn] for turn in range(samples) for pile in piles if turn < len(pile)]
    if not expected:
        return

    def make() -> ResumableLoader:
        dataset = Lines(samples)
        dataset.virtual_shards = shards  # type: ignore[attr-defined]
        return feed_of(dataset, batch_size, drop_last=drop_last)

    feed, start = make(), int(share * len(expected))
    found = []
    for _, batch in zip(range(start), feed.batches(0), strict=False):
        found.append(batch.tolist())
    if start:
        again = make()
        again.load_state_dict(feed.state_dict())
        feed = again
    if start < len(expected):
        found += [batch.tolist() for batch in feed.batches(0, start)]
    assert found == expected


def test_what_cannot_be_copied_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    class Locked(Lines):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    feed = feed_of(Locked())
    for epoch in (0, 1):
        assert len(list(feed.batches(epoch))) == 5
    (record,) = [record for record in caplog.records if "cannot be copied" in record.getMessage()]
    assert "Locked" in record.getMessage()


def test_data_that_end_before_the_place_of_the_run_are_refused() -> None:
    with pytest.raises(NotExact, match=r"over Lines ended after 2 batches, and the run had read 3 of it"):
        resumed(Lines(8), after(Lines(), 3), 3)
    with pytest.raises(NotExact, match=r"over Drawn ended after 2 batches, and the run had read 3 of it"):
        resumed(Drawn(8), after(Drawn(), 3), 3)


def test_an_exception_in_a_worker_says_where() -> None:
    class Torn(Lines):
        def __iter__(self) -> Iterator[int]:
            yield from (0, 1, 2, 3)
            raise OSError("no line 4")

    with pytest.raises(UserCodeError) as caught:
        list(feed_of(Torn(), num_workers=2).batches(0))
    text = str(caught.value)
    del caught  # its frames hold the workers
    gc.collect()
    assert text.startswith("Traceback")
    for words in ("OSError: no line 4", "the training loader over Torn, worker 0 of 2, batch 1", "in epoch 0"):
        assert words in text


class Filled(IterableDataset[Tensor]):
    """Yields how many transitions there are, and fills nothing itself."""

    def __init__(self, transitions: deque[int]) -> None:
        self.transitions = transitions

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(5):
            yield torch.tensor([float(len(self.transitions))])


class Agent(Net):
    """Fills the buffer that its data read."""

    lr = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.transitions, self.seen = deque[int](), list[float]()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Filled(self.transitions), batch_size=None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.transitions.append(batch_idx)
        self.seen.append(float(batch))
        return self.layer(batch).mean()


def test_a_stream_reads_the_buffer_that_training_fills(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent()
    trainer = Trainer(max_epochs=2, snapshots={"every_steps": 1}, enable_progress_bar=False)
    trainer.fit(agent, run=tmp_path)
    assert agent.seen == [0.0, 0.0, 1.0, 2.0, 3.0, 5.0, 5.0, 6.0, 7.0, 8.0]  # one batch is read ahead
    assert "transitions holds has changed since the epoch began" in caplog.text


class Shifted:
    """A stage of a library's stream that reads its epoch in memory that processes share, as that of open_clip."""

    def __init__(self) -> None:
        self.epoch = multiprocessing.Value("i", 0)

    def __call__(self, numbers: Iterator[int]) -> Iterator[Tensor]:
        by = 10.0 * self.epoch.value
        yield from (torch.tensor([number + by]) for number in numbers)


class TellsEpoch(Agent):
    """Tells a stream its next epoch."""

    def __init__(self, stage: Shifted) -> None:
        super().__init__()
        self.stage = [stage]

    def on_train_epoch_end(self) -> None:
        self.stage[0].epoch.value = self.current_epoch + 1


@pytest.mark.parametrize("workers", [0, 1])
def test_shared_memory_in_a_stream_of_a_library_is_kept(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import webdataset as wds

    seen = []
    for resume in ("auto", 8):  # inside of the second of three epochs
        module = TellsEpoch(Shifted())
        stream = wds.DataPipeline(lambda: iter(range(6)), module.stage[0])
        trainer = Trainer(max_epochs=3, snapshots={"every_steps": 1, "keep": 20}, enable_progress_bar=False)
        trainer.fit(module, DataLoader(stream, batch_size=None, num_workers=workers), run=tmp_path, resume=resume)
        seen.append(module.seen)
    assert seen[0] == seen[1] == [10.0 * epoch + number for epoch in range(3) for number in range(6)]
    assert "changed in training" not in caplog.text


@pytest.mark.parametrize("data", [range(10), Lines()], ids=["map", "stream"])
def test_packed_batches_say_how_many_samples_they_hold(data: Any) -> None:
    def packed(samples: list[Any]) -> Tensor:
        return torch.zeros(1, 3 * len(samples))

    settings = LoaderSettings(World(), TrainerOptions.model_validate({}), 7)
    reader = training_reader(DataLoader(data, 4, collate_fn=packed), "it", settings, seed=7)
    counts = [(batch.numel(), reader.last_samples) for batch in reader.batches(0)]
    assert len(counts) > 2
    assert all(size == 3 * count for size, count in counts)
