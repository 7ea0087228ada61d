"""A stream is tried before its state is trusted."""

import copy
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.line_streams import READ, Lines, Stateful, after, feed_of, resumed
from unit.data.test_iterable import REST

from midstride.engine.data.iterable import trial
from midstride.engine.data.iterable.shard_state import ShardState
from midstride.engine.errors import NotExact

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
def test_an_unrepeatable_stream_is_refused_before_training(name: str) -> None:
    with pytest.raises(NotExact, match="gives other samples when it is read again from its start"):
        next(feed_of(UNREPEATABLE[name](), check_repeatability=True).batches(0))


def counting(samples: list[int], calls: list[int] = []) -> torch.Tensor:  # noqa: B006
    calls.append(0)
    return torch.tensor(samples) + len(calls)


def test_a_collate_fn_that_counts_in_a_worker_is_refused() -> None:
    refused = "counting returned another batch for the same samples and seeds"
    with pytest.raises(NotExact, match=refused):
        next(feed_of(Lines(), collate_fn=counting, num_workers=1).batches(0))


class ToLargest:
    """Scales to the largest sample that it has seen: given the same again, it makes the same."""

    def __init__(self) -> None:
        self.largest = 0

    def __call__(self, samples: list[int]) -> torch.Tensor:
        self.largest = max(self.largest, *samples)
        return torch.tensor(samples) / self.largest


class Falling(Lines):
    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield 100 - number


def test_a_collate_fn_that_remembers_in_a_worker_is_refused() -> None:
    refused = r"ToLargest returned another batch .* \(\S*largest \(\d+, now \d+\)\), separately in each worker"
    with pytest.raises(NotExact, match=refused):
        list(feed_of(Falling(), collate_fn=ToLargest(), num_workers=1).batches(0))


def test_a_generator_that_copies_share_is_seeded() -> None:
    whole = [batch.tolist() for batch in feed_of(Drawing(drawn), check_repeatability=True).batches(0)]
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
            raise KeyError("position")
        return {"at": self.at}


class Lost(Forgetful):
    """Its state is one sample behind from the first one on."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at - 1}


class Stale(Stateful):
    """Once it has resumed, gives the state that it was given, on and on."""

    given: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.given or {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.given = state["at"], state


@pytest.mark.parametrize(
    ("kind", "why", "passed"),
    [
        (Stale, "the state after batch 3, taken after a resume, on, batch 4 was another one). {again}; here", []),
        (Forgetful, "batch 4 was another one). {again} after batch 1; here", [1]),
        (Mute, "KeyError: 'position'). {again} after batch 1; here", [1]),
        (Lost, "batch 2 was another one). {again}; here", []),
        (Arguing, "TypeError", []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_state_of_a_stream_is_named_and_not_used(
    kind: type[Lines], why: str, passed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    feed = feed_of(kind(), check_repeatability=True)
    found = [batch.tolist() for _, batch in zip(range(3), feed.batches(0), strict=False)]
    (message,) = [record.getMessage() for record in caplog.records if "does not restore" in record.getMessage()]
    assert why.format(again="A resumed run reads the epoch again from its start") in message
    state = copy.deepcopy(feed.state_dict())
    assert [note["batch"] for note in state["states"].values()] == passed
    again = feed_of(kind(), check_repeatability=True)
    again.load_state_dict(copy.deepcopy(state))
    assert found + [batch.tolist() for batch in again.batches(0, 3)] == [
        list(range(first, first + 4)) for first in range(0, 20, 4)
    ]
    assert resumed(kind(), state, 3) == REST
    assert list(range(4 * sum(passed), 20)) == READ


def test_workers_that_are_started_anew_say_it_once(tmp_path: Path) -> None:
    feed = feed_of(Forgetful(), num_workers=1, check_repeatability=True)
    handler = logging.FileHandler(tmp_path / "log")  # workers have it too
    logging.getLogger("midstride").addHandler(handler)
    try:
        assert [len([*feed.batches(epoch)]) for epoch in range(3)] == [5] * 3
    finally:
        logging.getLogger("midstride").removeHandler(handler)
        handler.close()
    assert (tmp_path / "log").read_text().count("does not restore") == 1


class Bare:
    """A shard of a stream, which is no loader."""

    def contents(self) -> dict[str, Any]:
        return {}


class Numbered(Bare):
    """A shard of batches 1, 2, 3, ..., each its own digest; its state is wrong after batch 3."""

    def __init__(self, note: ShardState | None) -> None:
        self.at = note.batch + (note.batch == 3) if note else 0

    def next_digest(self) -> int:
        self.at += 1
        return self.at

    def state(self) -> ShardState:
        return ShardState(self.at, 0, b"", 0, 0)


@pytest.mark.parametrize(("batches", "is_refused"), [(3, False), (4, True)])
def test_a_state_after_which_nothing_was_read_has_not_passed(
    batches: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", math.inf)
    monkeypatch.setattr(trial, "FEW_SAMPLES", 0)
    found = trial.try_stream(lambda note, _: Numbered(note), trial.SAMPLES // batches, "the loader")
    assert (found.passed, found.refused is not None) == (1, is_refused)


class Slow(Bare):
    """A shard on a clock of its own: so many seconds a batch; batches are mixed in a buffer that its state lacks."""

    now = 0.0

    def __init__(self, saved: ShardState | None, seconds: float, buffer: int) -> None:
        self.seconds, self.buffer = seconds, buffer
        self.at, self.wrong_from = saved.batch if saved else 0, buffer if saved and saved.batch else math.inf

    def next_digest(self) -> float:
        Slow.now += self.seconds
        self.at += 1
        return self.at + (self.at > self.wrong_from)

    def state(self) -> ShardState:
        return ShardState(self.at, 0, b"", 0, 0)


@pytest.mark.parametrize(
    ("sample_s", "batch_size", "is_tried", "most_s"),
    [(0.0, 4, True, 0.0), (0.01, 4, True, 6.0), (0.01, 32, True, 6.0), (0.1, 4, True, 30.0), (1.0, 32, False, 32.0)],
)
def test_a_slow_stream_is_tried_over_few_samples_or_seconds(
    sample_s: float, batch_size: int, is_tried: bool, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "now", 0.0)
    monkeypatch.setattr(trial.time, "monotonic", lambda: Slow.now)
    buffer = (128 if sample_s <= 0.01 else 40) // batch_size - 1

    found = trial.try_stream(lambda saved, _: Slow(saved, sample_s * batch_size, buffer), batch_size, "the loader")

    assert found.is_tried == is_tried
    assert (found.refused is not None) == is_tried
    assert Slow.now <= most_s


def test_a_state_found_wrong_on_resume_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Untried, as by `rng="batch"`: only what is read again tells."""
    assert resumed(Forgetful(), after(Forgetful(), 4), 4) == REST[1:]
    assert any("does not restore batch 4" in record.getMessage() for record in caplog.records)


def test_data_that_changed_under_a_run_are_refused() -> None:
    other = Lines()
    other.__class__ = type("Other", (Lines,), {"__iter__": lambda self: iter(range(1, 21))})
    with pytest.raises(
        NotExact, match="gives other samples than before the run died, in the 3 batches that it had read"
    ):
        resumed(other, after(Lines(), 3), 3)
