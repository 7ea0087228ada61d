"""A loop in one process: what is refused by name, what is warned of, and how it ends."""

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Loop
from midstride.engine.errors import EngineError, JobError, UserError

DATA = DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2)), 2, shuffle=True)


class Script:
    """A small training, in parts."""

    def __init__(self, run: Path, **options: Any) -> None:
        self.loop = Loop(run, **{"snapshots": {"every_steps": 2}, "enable_progress_bar": False, **options})
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.steps = 0

    def kept(self, data: Any = DATA) -> "Script":
        self.loop.keep(model=self.model, optimizer=self.optimizer)
        self.train = self.loop.loader(data)
        return self

    def run(self, epochs: int) -> None:
        for _ in self.loop.epochs(epochs):
            for batch in self.train:
                self.step(batch)

    def step(self, batch: Any) -> None:
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loop.log("loss", loss)
        self.steps += 1


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(**options: Any) -> Script:
        made.append(Script(tmp_path / "run", **options))
        return made[-1]

    yield make
    for one in made:
        one.loop.close()


def refused(act: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        act()


def test_bad_input_is_refused_by_name(script: Callable[..., Script]) -> None:
    one = script()
    loop, model = one.loop, one.model
    loop.keep(model=model)
    refused(lambda: loop.keep(again=model), "kept already, as model")
    refused(lambda: loop.keep(model=nn.Linear(1, 1)), "model is kept already")
    refused(lambda: loop.keep(count=3), "loop.state.count")
    refused(lambda: loop.loader(loop.loader(DATA)), "once")
    refused(lambda: loop.steps(DATA, 3), "wrap it first")
    refused(lambda: loop.log("loss", 1.0), "before the loop")
    refused(lambda: loop.save_weights("best"), "before the loop")
    loop.keep(other=torch.optim.SGD(nn.Linear(1, 1).parameters()))
    refused(lambda: next(loop.epochs(1)), "of no kept module")


def test_nothing_kept_is_refused(script: Callable[..., Script]) -> None:
    refused(lambda: next(script().loop.epochs(1)), "nothing is kept")


def test_no_snapshots_are_refused(script: Callable[..., Script]) -> None:
    with pytest.raises(JobError, match="snapshots: None"):
        script(snapshots=None)


def test_keep_and_loader_come_before_the_loop(script: Callable[..., Script]) -> None:
    one = script().kept()
    for _ in one.loop.epochs(1):
        refused(lambda: one.loop.keep(other=[]), "before")
        refused(lambda: one.loop.loader(DATA), "before")
    refused(lambda: one.loop.log("late", 1.0), "after the loop")


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda loader: itertools.islice(loader, 2), "islice"),
        (lambda loader: itertools.cycle(loader), "cycle"),
        (lambda loader: zip(loader, [1, 2], strict=False), "list_iterator"),
    ],
    ids=["islice", "cycle", "zip"],
)
def test_wrappers_that_hold_items_are_refused(wrap: Any, words: str, script: Callable[..., Script]) -> None:
    one = script().kept()
    for _ in one.loop.epochs(1):
        refused(lambda: next(iter(wrap(one.train))), words)
        break


def test_a_loop_left_by_an_exception_is_refused(script: Callable[..., Script]) -> None:
    one = script().kept()

    def fail() -> None:
        for _ in one.loop.epochs(2):
            for batch in one.train:
                one.step(batch)
                _ = 1 / (one.steps - 3)

    with pytest.raises(ZeroDivisionError):
        fail()
    refused(lambda: next(one.loop.epochs(2)), "left by an exception")
    again = script().kept()  # as a cell of a notebook that is run again
    for _ in again.loop.epochs(2):
        for batch in again.train:
            again.step(batch)
    assert again.steps == 10  # from the snapshot of step 2
    refused(lambda: next(one.loop.epochs(2)), "closed")


def test_a_loop_reads_a_function_of_batches(script: Callable[..., Script]) -> None:
    def batches() -> Iterator[Any]:
        yield from DATA

    for epochs, steps in ((1, 6), (3, 12)):
        one = script().kept(batches)
        one.run(epochs)
        assert one.steps == steps


def test_a_loop_left_by_break_is_over(script: Callable[..., Script], tmp_path: Path) -> None:
    for steps in (4, 0):
        one = script().kept()
        for _ in one.loop.epochs(5):
            for batch in one.train:
                one.step(batch)
                if one.steps == 4:
                    break
            break
        assert one.steps == steps
        assert len((tmp_path / "run/metrics.csv").read_text().splitlines()) == 5
        one.loop.close()


def test_a_larger_number_goes_on(script: Callable[..., Script]) -> None:
    for count, steps in ((1, 6), (1, 0), (3, 12)):
        one = script().kept()
        for _ in one.loop.epochs(count):
            for batch in one.train:
                one.step(batch)
        assert one.steps == steps
        one.loop.close()


def test_a_carried_variable_is_named_once(script: Callable[..., Script], caplog: pytest.LogCaptureFixture) -> None:
    one, total, loss = script().kept(), 0.0, None
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(2):
            for batch in one.train:
                one.step(batch)
                loss = batch[0].sum()
                total += loss
    said = [record.getMessage() for record in caplog.records if "from one iteration" in record.getMessage()]
    assert len(said) == 1
    assert "total in test_a_carried" in said[0]
    assert "one.steps in" in said[0]
    assert "loss" not in said[0]
    assert total > 0


def test_an_exact_loop_says_nothing(script: Callable[..., Script], caplog: pytest.LogCaptureFixture) -> None:
    one = script().kept()
    one.loop.state.total = 0.0
    with caplog.at_level(logging.WARNING):
        for epoch in one.loop.epochs(2):
            for number, (x,) in enumerate(one.train):
                loss = one.model(x).square().mean()
                loss.backward()
                one.optimizer.step()
                one.optimizer.zero_grad()
                one.loop.state.total += loss.item() * number
            one.loop.log("last", loss.item() + epoch)
    assert [record.getMessage() for record in caplog.records] == []


def test_an_object_that_cannot_be_filled_is_refused(script: Callable[..., Script]) -> None:
    for number in range(2):
        one = script().kept()
        one.loop.keep(pair=(torch.zeros(1), [0]))
        try:
            for batch in one.loop.steps(one.train, 3 + number):
                one.step(batch)
        except EngineError as error:
            assert "loop.state.pair" in str(error)  # noqa: PT017  # it may also be filled
        one.loop.close()
