"""Iterable data sets: shards dealt in turn, what is read again on resume, and what is said when that cannot be."""

import copy
import gc
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from midstride.engine import Trainer, TrainingModule
from midstride.engine.data.iterable import trial
from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.iterable.shard import STATE_BYTES
from midstride.engine.data.iterable.shard_state import Note
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import NotExact, UserCodeError, UserError
from midstride.engine.state.codec import differences

#: what was read in this process, by whatever copy of a data set
READ: list[int] = []


class Lines(IterableDataset[int]):
    """Numbers, sharded over the workers."""

    def __init__(self, samples: int = 20) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for number in range(info.id if info else 0, self.samples, info.num_workers if info else 1):
            READ.append(number)
            yield number


class Stateful(Lines):
    """Carries `weight` bytes in its state."""

    weight, at = 0, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.at, self.samples):
            self.at = number + 1
            READ.append(number)
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "weight": torch.zeros(self.weight, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Drawn(Lines):
    def __init__(self, samples: int = 20) -> None:
        super().__init__(samples)
        self.sampler = range(samples)

    def __iter__(self) -> "Drawn":  # type: ignore[override]
        self.indices = iter(self.sampler)
        return self

    def __next__(self) -> int:
        number = next(self.indices)
        READ.append(number)
        return number


def feed_of(dataset: Any, batch_size: int | None = 4, *, tries: bool = False, **options: Any) -> ResumableLoader:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size, **options)
    return IterableLoader(loader, name="the training loader", key=3, limit=1.0, tries=tries, agree=bool)


def resumed(dataset: Any, state: dict[str, Any], start: int) -> list[Any]:
    """Return what a new life reads from batch `start` on, with `READ` holding what it took to get there."""
    feed = feed_of(dataset)
    feed.load_state_dict(copy.deepcopy(state))
    READ.clear()
    return [batch.tolist() for batch in feed.batches(0, start)]


def after(dataset: Any, batches: int) -> dict[str, Any]:
    """Return the state after so many batches."""
    feed = feed_of(dataset)
    for _, _batch in zip(range(batches), feed.batches(0), strict=False):
        pass
    return copy.deepcopy(feed.state_dict())


REST = [[12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.parametrize("kind", [Stateful, Drawn])
def test_what_has_a_state_or_a_sampler_goes_on_with_one_batch_read_again_to_compare_it(kind: type[Lines]) -> None:
    assert resumed(kind(), after(kind(), 3), 3) == REST
    assert list(range(8, 20)) == READ


class Skipping(Drawn):
    """Leaves out what its sampler gives third."""

    def __next__(self) -> int:
        number = super().__next__()
        return super().__next__() if number % 3 == 2 else number


def test_indices_of_a_sampler_that_are_left_out_are_no_place_to_go_on_from(caplog: pytest.LogCaptureFixture) -> None:
    state = after(Skipping(), 2)
    assert state["states"] == {}
    assert resumed(Skipping(), state, 2) == [[12, 13, 15, 16], [18, 19]]
    assert "does not bring it back" not in caplog.text


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
    (message,) = [record.getMessage() for record in caplog.records if "replaying" in record.getMessage()]
    assert message.startswith("replaying 3 batches of the training loader over Lines")


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


def test_every_epoch_starts_from_the_data_set_as_it_was_given() -> None:
    feed = feed_of(Stateful())
    assert [[batch.tolist() for batch in feed.batches(epoch)] for epoch in (0, 1)][1][0] == [0, 1, 2, 3]


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


DRAW = random.Random(4)


def drawn() -> float:
    return DRAW.random()


class Drawing(Lines):
    """Adds a number that it draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield number + self.draw()


class Taken(Lines):
    """Takes away what it reads, from what its copies share."""

    def __iter__(self) -> Iterator[Any]:
        while QUEUE:
            yield QUEUE.pop()


QUEUE = list(range(20))
UNREPEATABLE = {
    "the system": lambda: Drawing(lambda: os.urandom(1)[0] + os.urandom(1)[0] / 256),
    "the clock": lambda: Drawing(time.perf_counter),
    "a closure of a closure": lambda: Drawing(random.Random(3).random),
    "a queue": Taken,
}


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_a_stream_that_does_not_repeat_itself_is_refused_before_training(name: str) -> None:
    with pytest.raises(NotExact, match="gives other samples when it is read again from its start"):
        next(feed_of(UNREPEATABLE[name](), tries=True).batches(0))


def test_a_generator_that_copies_share_is_seeded() -> None:
    whole = [batch.tolist() for batch in feed_of(Drawing(drawn), tries=True).batches(0)]
    DRAW.random()
    assert resumed(Drawing(drawn), after(Drawing(drawn), 3), 3) == whole[3:]


class Forgetful(Stateful):
    """Its state is one sample behind from its ninth sample on."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at - (self.at > 8)}


class Arguing(Lines):
    def state_dict(self, samples: int) -> dict[str, Any]:
        return {"at": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class Mute(Stateful):
    """Says nothing of its place from its ninth sample on."""

    def state_dict(self) -> dict[str, Any]:
        if self.at > 8:
            raise KeyError("place")
        return {"at": self.at}


class Lost(Forgetful):
    """Its state is one sample behind from the first one on."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at - 1}


@pytest.mark.parametrize(
    ("kind", "why", "passed"),
    [
        (Forgetful, "batch 4 was another one). {again} after batch 1; here", [1]),
        (Mute, "KeyError: 'place'). {again} after batch 1; here", [1]),
        (Lost, "batch 2 was another one). {again}; here", []),
        (Arguing, "TypeError", []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_state_that_does_not_bring_the_stream_back_is_named_and_not_used(
    kind: type[Lines], why: str, passed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    feed = feed_of(kind(), tries=True)
    found = [batch.tolist() for _, batch in zip(range(3), feed.batches(0), strict=False)]
    (message,) = [record.getMessage() for record in caplog.records if "does not bring it back" in record.getMessage()]
    assert why.format(again="So a run that resumes reads again what was read of the epoch") in message
    state = copy.deepcopy(feed.state_dict())
    assert [note["batch"] for note in state["states"].values()] == passed
    again = feed_of(kind(), tries=True)
    again.load_state_dict(copy.deepcopy(state))
    assert found + [batch.tolist() for batch in again.batches(0, 3)] == [
        list(range(first, first + 4)) for first in range(0, 20, 4)
    ]
    assert resumed(kind(), state, 3) == REST
    assert list(range(4 * sum(passed), 20)) == READ


class Numbered:
    """A shard of batches 1, 2, 3, ..., each its own digest; its state is wrong after batch 3."""

    def __init__(self, note: Note | None) -> None:
        self.at = note.batch + (note.batch == 3) if note else 0

    def next_digest(self) -> int:
        self.at += 1
        return self.at

    def note(self) -> Note:
        return Note(self.at, 0, b"")


@pytest.mark.parametrize(("batches", "is_refused"), [(3, False), (4, True)])
def test_a_state_after_which_nothing_was_read_has_not_passed(
    batches: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", math.inf)
    found = trial.try_stream(lambda note, _: Numbered(note), trial.SAMPLES // batches, "the loader")
    assert (found.passed, found.refused is not None) == (1, is_refused)


def test_a_state_that_turns_out_wrong_on_resume_is_left_for_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """Untried, as by `rng="batch"`: only what is read again tells."""
    assert resumed(Forgetful(), after(Forgetful(), 4), 4) == REST[1:]
    assert any("does not bring it back to batch 4" in record.getMessage() for record in caplog.records)


def test_data_that_changed_under_a_run_are_refused() -> None:
    other = Lines()
    other.__class__ = type("Other", (Lines,), {"__iter__": lambda self: iter(range(1, 21))})
    with pytest.raises(
        NotExact, match="gives other samples than before the run died, in the 3 batches that it had read"
    ):
        resumed(other, after(Lines(), 3), 3)


def test_snapshots_of_older_versions_are_resumed() -> None:
    state = after(Stateful(), 3)
    del state["digests"]
    state["states"] = {0: {"batch": 3, "due": 4, "state": {"at": 12, "weight": torch.zeros(0)}}}
    feed = feed_of(Stateful())
    feed.load_state_dict(copy.deepcopy(state))
    assert not differences(feed.state_dict(), state)
    assert [batch.tolist() for batch in feed.batches(0, 3)] == REST


class Module(TrainingModule):
    """Validates where it is told, and notes where that was."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.layer, self.dataset = nn.Linear(1, 1), dataset
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[:, None].float()).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.trainer.progress.batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, 4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Lines(3), 4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sized(Lines):
    def __len__(self) -> int:
        return self.samples


@pytest.mark.parametrize(
    ("dataset", "interval", "places"), [(Lines(), 1.0, [5]), (Lines(), 2, [2, 4]), (Sized(), 0.5, [2, 4])]
)
def test_validation_comes_where_it_is_due(dataset: Any, interval: float, places: list[int]) -> None:
    module = Module(dataset)
    Trainer(max_epochs=1, val_check_interval=interval, enable_progress_bar=False).fit(module)
    assert module.validated == places


def test_a_share_of_an_epoch_of_unknown_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"val_check_interval=0\.5 is a share .* Use a number of batches, or 1\.0"):
        Trainer(max_epochs=1, val_check_interval=0.5, enable_progress_bar=False).fit(Module(Lines()))


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_limit_that_leaves_nothing_is_refused(limit: float) -> None:
    with pytest.raises(UserError, match=r"limit_train_batches=0.* leaves none"):
        Trainer(max_epochs=1, limit_train_batches=limit, enable_progress_bar=False).fit(Module(Lines()))


def test_the_last_batch_closes_a_window_that_is_not_full() -> None:
    trainer = Trainer(max_epochs=2, accumulate_grad_batches=3, enable_progress_bar=False)
    trainer.fit(Module(Lines()))
    assert trainer.progress.step == 2 * 2
