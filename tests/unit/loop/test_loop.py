"""A loop in one process: what is refused by name, what is warned of, and how it ends."""

import itertools
import logging
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from midstride.engine import Loop
from midstride.engine.errors import EngineError, JobError, UserError
from midstride.engine.loop import variables

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
    refused(lambda: next(loop.epochs(1)), "2 of 2 parameters that no kept object holds")


def test_an_optimizer_that_keeps_parts_on_ranks_is_refused(script: Callable[..., Script]) -> None:
    in_parts: Any = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    one = script()
    refused(lambda: one.loop.keep(optimizer=in_parts(one.model.parameters())), "a part of its state on each rank")


def test_a_loop_after_its_model_is_named(script: Callable[..., Script], caplog: pytest.LogCaptureFixture) -> None:
    for is_late in (False, True):
        torch.seed()
        if is_late:
            nn.Linear(2, 1)
        with caplog.at_level(logging.WARNING):
            script().loop.close()
        assert any("built after random numbers" in one.message for one in caplog.records) == is_late


def test_an_iterator_made_before_the_loop_continues_its_pass(script: Callable[..., Script]) -> None:
    seen = list[float]()
    for count in (2, 6):
        one = script().kept()
        batches = iter(one.train)
        for _ in one.loop.steps(count):
            one.step(batch := next(batches))
            seen += batch[0].flatten().tolist()
        assert one.train.batch == count
        one.loop.close()
    assert sorted(seen) == [*range(24)]


Pair = Callable[[Any, Any], None]


def by_zip(one: Script, other: Any, use: Pair) -> None:
    for _ in one.loop.epochs(3):
        for first, second in zip(one.train, other, strict=False):
            use(first, second)


def by_an_iterator_for_each_epoch(one: Script, other: Any, use: Pair) -> None:
    for _ in one.loop.epochs(3):
        seconds = iter(other)
        for first in one.train:
            use(first, next(seconds))


def by_an_iterator_for_all_epochs(one: Script, other: Any, use: Pair) -> None:
    seconds = iter(other)
    for _ in one.loop.epochs(3):
        for first in one.train:
            if (second := next(seconds, None)) is None:
                second = next(seconds := iter(other))
            use(first, second)


def by_a_generator(one: Script, other: Any, use: Pair) -> None:
    seconds = (batch for _ in itertools.count() for batch in other)
    for _ in one.loop.epochs(3):
        for first in one.train:
            use(first, next(seconds))


@pytest.mark.parametrize("samples", [12, 16], ids=["as long", "longer"])
@pytest.mark.parametrize("read", [by_zip, by_an_iterator_for_each_epoch, by_an_iterator_for_all_epochs, by_a_generator])
def test_a_second_loader_after_the_end_of_an_epoch_reads_as_undisturbed(
    read: Callable[[Script, Any, Pair], None], samples: int, tmp_path: Path
) -> None:
    def pairs(run: str, *ends: int) -> list[list[int]]:
        """Return the samples of each step, in a run that ends in the steps of numbers `ends` and is resumed."""
        seen: dict[int, list[int]] = {}
        for end in (*ends, None):
            one = Script(tmp_path / run, snapshots={"every_steps": 1}).kept()
            other = one.loop.loader(DataLoader(TensorDataset(torch.arange(samples)), 2, shuffle=True))

            def use(first: Any, second: Any, one: Script = one, end: int | None = end) -> None:
                if (step := one.loop._progress.step) == end:
                    raise KeyError
                one.step(first)
                seen[step] = [*first[0].flatten().tolist(), *second[0].tolist()]

            with nullcontext() if end is None else pytest.raises(KeyError):
                read(one, other, use)
            one.loop.close()
        return [*seen.values()]

    whole = pairs("whole")
    assert len(whole) == 18
    assert pairs("resumed", 6, 12, 13) == whole


def test_the_batch_of_a_loader_between_passes_is_0(script: Callable[..., Script]) -> None:
    one, seen = script().kept(), list[int]()
    for _ in one.loop.epochs(2):
        seen.append(one.train.batch)
        for batch in one.train:
            one.step(batch)
    assert seen == [0, 0]


def test_nothing_kept_is_refused(script: Callable[..., Script]) -> None:
    loop = script().loop
    refused(lambda: next(loop.epochs(1)), "nothing is kept")
    loop.state.weights = torch.zeros(2)
    assert [*loop.steps(1)] == [0]


def test_loops_of_which_nothing_is_kept_are_named(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one = script()
    one.loop.keep(model=one.model, optimizer=one.optimizer)
    refused(lambda: next(one.loop.epochs(1)), r"epochs\(1\) without a loader of the loop")
    with caplog.at_level(logging.WARNING):
        one = script().kept()
        for _ in one.loop.epochs(2):
            for batch in DATA:
                one.step(batch)
        assert ["no loader of the loop was read" in r.message for r in caplog.records].count(True) == 1
        caplog.clear()
        one = script().kept()
        assert len([*one.train]) == 6
        one.loop.close()
        assert ["so nothing is saved" in r.message for r in caplog.records] == [True]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.5), "SGD: lr is asked to be 0.5 now, and stays 0.01"),
        (lambda model: torch.optim.Adam(model.parameters()), "this is not the run that"),
    ],
)
def test_a_script_that_changed_between_attempts_is_named(
    optimizer: Any, words: str, script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    script().kept().run(1)
    one = script()
    one.optimizer = optimizer(one.model)
    one.kept()
    said = ""
    with caplog.at_level(logging.WARNING):
        try:
            one.run(2)
        except EngineError as error:
            said = str(error)
    assert words in caplog.text + said


def test_no_snapshots_are_refused(script: Callable[..., Script]) -> None:
    with pytest.raises(JobError, match=r"(?s)fault in Loop\(.*snapshots: None"):
        script(snapshots=None)


def test_keep_and_loader_come_before_the_loop(script: Callable[..., Script]) -> None:
    one = script().kept()
    for _ in one.loop.epochs(1):
        refused(lambda: one.loop.keep(other=[]), "Call it earlier")
        refused(lambda: one.loop.loader(DATA), "Call it earlier")
    refused(lambda: one.loop.log("late", 1.0), "after the loop")


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda loader: itertools.islice(loader, 2), "islice"),
        (lambda loader: itertools.cycle(loader), "cycle"),
        (lambda loader: zip(loader, [1, 2], strict=False), "list_iterator"),
        (lambda loader: iter([len(batch) for batch in loader]), "comprehension"),
        (lambda loader: iter([sum(len(batch) for batch in loader)]), "such as sum"),
        (lambda loader: iter(list(map(len, loader))), "such as sum or list"),
    ],
    ids=["islice", "cycle", "zip", "comprehension", "sum", "list"],
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
    again.run(2)
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
        one.run(count)
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


def test_a_generator_of_the_script_is_named(script: Callable[..., Script], caplog: pytest.LogCaptureFixture) -> None:
    one, drawn, kept = script().kept(), torch.Generator().manual_seed(1), Counted()
    one.loop.keep(kept=kept)
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(1):
            for batch in one.train:
                one.step(batch)
                kept.count += float(torch.rand((), generator=drawn)) + len([value for value in batch])
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "drawn in test_a_generator" in said
    assert "kept" not in said


def test_what_functions_and_other_models_hold_is_named(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one, student, calls = script().kept(), nn.Linear(2, 1), 0
    optimizer, losses = torch.optim.SGD(student.parameters(), lr=0.1), Counted()

    def counter() -> Callable[[], int]:
        count = 0

        def advance() -> int:
            nonlocal count
            count += 1
            return count

        return advance

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return student(batch[0]).sum()

    advance, add, forward = counter(), losses.add, one.model.forward
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(2):
            for batch in one.train:
                one.step(batch)
                loss = closure() * advance() + forward(batch[0]).sum()
                loss.backward()
                optimizer.step()
                add(1.0)
    said = [record.getMessage() for record in caplog.records if "from one iteration" in record.getMessage()]
    for name in ("advance.count in test_what", "closure (calls, student) in", "add.count in test_what"):
        assert name in said[0], name
    for name in ("batch", "forward", "one.model"):
        assert name not in said[0], name


class Counted:
    """An object of a script that counts, and is kept."""

    def __init__(self) -> None:
        self.count = 0.0

    def add(self, value: float) -> None:
        self.count += value


def counting() -> Callable[..., int]:
    count = 0

    def advance(*_: object) -> int:
        nonlocal count
        count += 1
        return count

    return advance


#: a function of a script that a loop keeps
COUNTS = counting()


def test_a_kept_function_that_counts_is_not_named(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one = script().kept()
    one.loop.keep(counts=COUNTS, held=Counted())  # of a class of this module, whose globals are searched
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(1):
            for batch in one.train:
                one.step(batch)
                COUNTS()
    assert not any("counting" in record.getMessage() for record in caplog.records)


class Reads:
    """An object of a script that no file can hold."""

    def __init__(self) -> None:
        self.rows = (row for row in range(9))


def test_what_no_file_can_hold_is_named_with_the_way_out(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one = script().kept()
    one.loop.keep(reader=Reads())
    with caplog.at_level(logging.WARNING):
        one.run(1)
    assert "kept.reader.rows, a generator. If training changes it, keep it by state_dict" in caplog.text


class Steps:
    """An object of a script with a function that counts."""

    def __init__(self) -> None:
        self.advance = counting()


@pytest.mark.parametrize(
    ("held", "advance", "name"),
    [
        (partial(counting(), 1.0), lambda held: held(), "held.func.count"),
        ({"one": counting()}, lambda held: held["one"](), "held['one'].count"),
        ([counting()], lambda held: held[0](), "held[0].count"),
        (Steps(), lambda held: held.advance(), "held.advance.count"),
    ],
    ids=["a partial", "a dict", "a list", "an object"],
)
def test_a_function_that_counts_is_named_where_it_is_held(
    held: Any, advance: Callable[[Any], int], name: str, script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one = script().kept()
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(1):
            for batch in one.train:
                one.step(batch)
                advance(held)
    assert f"{name} in test_a_function" in " ".join(record.getMessage() for record in caplog.records)


def rates(rate: float) -> Iterator[float]:
    while True:
        yield rate
        rate *= 0.5


def forever(loader: Any) -> Iterator[Any]:
    while True:
        for _, batch in enumerate(loader):
            yield batch


@pytest.mark.parametrize(
    ("iterator", "words"),
    [
        (lambda loop: rates(0.1), "keep other values of the generator in loop.state"),
        (lambda loop: forever(DATA), "read its loaders by loop.loader"),
        (lambda loop: iter(DATA), "iterate over the result of loop.loader"),
        (lambda loop: forever(loop.loader(DATA)), ""),
    ],
    ids=["a generator", "a generator over a loader", "an iterator of a loader", "a generator over a loop's loader"],
)
def test_an_iterator_that_no_snapshot_holds_is_named(
    iterator: Callable[[Loop], Iterator[Any]],
    words: str,
    script: Callable[..., Script],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = script().kept()
    made = iterator(one.loop)
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(1):
            for batch in one.train:
                one.step(batch)
                next(made)
    said = [record.getMessage() for record in caplog.records if "made in test_an_iterator" in record.getMessage()]
    assert len(said) == bool(words)
    assert words in "".join(said)


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        ([0.0], lambda one, held: one.append(1.0) or held.update(one=[], used=one)),
        (itertools.count(), lambda one, held: next(one)),
        (torch.zeros(1), lambda one, held: one.resize_(len(one) + 1).zero_()),
    ],
    ids=["moved to another place", "a count", "resized"],
)
def test_a_variable_over_a_kept_object_that_a_restore_does_not_fill_is_named(
    kept: Any, change: Callable[..., Any], script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one, held = script().kept(), {"one": kept}
    one.loop.keep(held=held)
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(1):
            for batch in one.train:
                one.step(batch)
                change(kept, held)
    said = " ".join(record.getMessage() for record in caplog.records if "from one iteration" in record.getMessage())
    assert "kept in test_a_variable" in said


def test_an_exact_loop_says_nothing(script: Callable[..., Script], caplog: pytest.LogCaptureFixture) -> None:
    one, recent = script().kept(), list[float]()
    one.loop.keep(held={"recent": recent})
    weights, optimizers = list(one.model.parameters()), {"all": one.optimizer}
    whole = nn.Sequential(one.model, nn.Flatten())
    group = one.optimizer.param_groups[0]
    one.loop.state.total = 0.0
    with caplog.at_level(logging.WARNING):
        for epoch in one.loop.epochs(2):
            losses = one.loop.state.losses = Counted()
            for number, (x,) in enumerate(one.train):
                loss = whole(x).square().mean()
                losses.count += 1.0
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizers["all"].step()
                one.optimizer.zero_grad()
                group["lr"] *= 0.9
                recent.append(loss.item())
                one.loop.state.total += recent[-1] * number
            one.loop.log("last", loss.item() + epoch)
    assert group is one.optimizer.param_groups[0]
    assert [record.getMessage() for record in caplog.records] == []


@lru_cache
def square(index: int) -> int:
    return index**2


class Relabelled(Dataset[Any]):
    def __init__(self) -> None:
        self.labels, self.rounds = torch.zeros(12, 1), 0
        self.lock: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.lock = self.lock or threading.Lock()  # which no snapshot holds, as a database that reading opens
        return torch.cat([self.labels[index], torch.ones(1)]), square(index)


class HardestFirst(Sampler[int]):
    def __init__(self) -> None:
        self.losses = torch.zeros(12)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(self.losses.argsort(stable=True).tolist())


SAMPLER = HardestFirst()


def test_what_training_or_reading_changes_in_data_and_samplers_is_not_named(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    data, sampler = Relabelled(), SAMPLER
    one = script().kept(DataLoader(data, 2, sampler=sampler))
    with caplog.at_level(logging.WARNING):
        for _ in one.loop.epochs(2):
            for batch in one.train:
                one.step(batch)
                sampler.losses[batch[1].sqrt().long()] += 1.0
            data.labels, data.rounds = data.labels + 1.0, data.rounds + 1
    assert [record.getMessage() for record in caplog.records if ": one" not in record.getMessage()] == []


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


class ProxiedFrame:
    """A frame as of Python 3.13, whose variables are a proxy with a list of keys."""

    class Proxy(UserDict[str, Any]):
        def keys(self) -> Any:
            return [*self.data]

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self.frame, name)

    @property
    def f_locals(self) -> Proxy:
        return self.Proxy(self.frame.f_locals)


def test_variables_are_named_where_frames_are_proxied(
    script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frames = variables.iterating_frames
    monkeypatch.setattr(variables, "iterating_frames", lambda: map(ProxiedFrame, frames()))
    one, total = script().kept(), 0
    for _ in one.loop.epochs(2):
        for batch in one.train:
            one.step(batch)
            total += 1
    assert total == 12
    assert "total in test_variables_are_named_where_frames_are_proxied" in caplog.text
