"""Loaders that are no plain DataLoaders: each continues from any batch, and gives what it gives by itself."""

import copy
import itertools
import logging
import queue
import random
import re
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.nets import Net
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from midstride.engine import Trainer
from midstride.engine.config.options import TrainerOptions
from midstride.engine.data import whole_loader
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LoaderResolver, LoaderSettings
from midstride.engine.errors import NotExact, UserError
from midstride.engine.loop.feeds import reader_of
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences
from midstride.engine.strategies.collective import SingleProcess
from midstride.engine.world import World

DATA = TensorDataset(torch.arange(20.0))
EPOCHS = 3


class Counting:
    """Two loaders side by side, whose order is that of a generator; counts its passes."""

    def __init__(self) -> None:
        self.loader = DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
        self.other, self.passes = DataLoader(DATA, 8, shuffle=True), 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        for (x,), (y,) in zip(self.loader, itertools.cycle(self.other), strict=False):
            yield torch.cat([x, y[:2], torch.tensor([float(self.passes), random.random()])])


class Changed(DataLoader[Any]):
    """Changes what it reads."""

    def __iter__(self) -> Any:
        for (x,) in super().__iter__():
            yield x * 2


class Kept:
    """Continues one iterator over its passes."""

    def __init__(self) -> None:
        self.iterator = endless()

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self.iterator, 5)


class Wrapping:
    """Reads another loader, as the prefetching one of timm does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        return (x * 2 for x in self.loader)


class Repeating(DataLoader[Any]):
    """Continues one iterator of its own, as that of timm does."""

    def __init__(self) -> None:
        super().__init__(DATA, 4, sampler=RandomSampler(DATA, num_samples=10**6))
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for (x,) in itertools.islice(self.iterator, 5):
            yield x


class Lazy(Repeating):
    """Begins to continue an iterator in its first pass, as that of timm does since 1.0.20."""

    def __init__(self) -> None:
        super().__init__()
        self.iterator: Any = None

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.iterator = DataLoader.__iter__(self)
        return super().__iter__()


class Left(DataLoader[Any]):
    """Leaves the iterator of each pass where it was, and continues none."""

    def __iter__(self) -> Any:
        self.iterator = super().__iter__()
        for (x,) in self.iterator:
            yield x


def library() -> Any:
    """Return a library with two loaders: one counts its passes in an object, one holds a given object."""
    code = """
class Order:
    def __init__(self):
        self.passes = -1

class Counting:
    def __init__(self):
        self.order = Order()

    def __iter__(self):
        self.order.passes += 1
        return iter([torch.full((2,), 10.0 * self.order.passes + number) for number in range(5)])

class Holding:
    def __init__(self, held):
        self.held = held

    def __iter__(self):
        return iter(self.held)
"""
    library = sys.modules.setdefault("a_library", types.ModuleType("a_library"))
    library.__file__ = f"{sysconfig.get_paths()['purelib']}/a_library.py"
    vars(library)["torch"] = torch
    if not hasattr(library, "Counting"):
        exec(code, vars(library))
    return library


class Passes:
    """Counts passes, and puts its data into another order in each."""

    def __init__(self) -> None:
        self.passes, self.order, self.seen = -1, [*range(5)], {"first": [0]}

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        random.Random(self.passes).shuffle(self.order)
        self.seen["first"] += [self.order[0]]
        yield from (torch.tensor([number, sum(self.seen["first"])]) for number in self.order)


class Noisy(Dataset[Tensor]):
    """Draws in a worker."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + random.random(), torch.rand(1)])


class InThread(DataLoader[Any]):
    """Reads in a thread, as the DataLoaderX of many projects does."""

    def __iter__(self) -> Any:
        return Prefetching(super().__iter__())


class Prefetching(threading.Thread):
    """An iterator over the items of another one, which a thread reads ahead.

    Passes differ in the time at which the thread starts to draw.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__(daemon=True)
        self.items, self.ready = items, queue.Queue[Any](1)
        self.start()

    def run(self) -> None:
        time.sleep(next(DELAYS))
        for item in self.items:
            self.ready.put(item)
        self.ready.put(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (item := self.ready.get()) is None:
            raise StopIteration
        return item


#: seconds
DELAYS = itertools.cycle([0.0, 0.01, 0.0])


class Early:
    """Leaves the passes of a loader before their end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self.loader, 5)


def persistent(samples: int = 10) -> DataLoader[Tensor]:
    return DataLoader(Noisy(samples), 2, shuffle=True, num_workers=1, persistent_workers=True)


class Positioned:
    """Says its position; how many passes were before only its state tells."""

    def __init__(self, wrong: bool = False) -> None:
        self.at = self.skip = 0
        self.wrong, self.hidden = wrong, {id(self): 0}

    def __iter__(self) -> Iterator[Tensor]:
        start, self.skip = self.skip, 0
        self.hidden[id(self)] += not start
        for at in range(start, 5):
            self.at = at + 1
            yield torch.tensor([float(at), float(self.hidden[id(self)])])

    def __deepcopy__(self, memo: Any) -> "Positioned":
        other = Positioned(self.wrong)
        other.skip, other.hidden[id(other)] = self.skip, self.hidden[id(self)]
        return other

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at + (self.wrong and self.at > 2), "passes": self.hidden[id(self)]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip, self.hidden[id(self)] = state["at"], state["passes"]


class Batches(IterableDataset[Tensor]):
    """Makes batches of what another loader reads, as the WebLoader of webdataset does."""

    def __init__(self, seed: int | None = 3) -> None:
        self.loader, self.draw = DataLoader(DATA, 2), random.Random(seed)
        self.seed = seed

    def __iter__(self) -> Iterator[Tensor]:
        draw = self.draw if self.seed is not None else random.Random()  # nosec
        order = [x for (x,) in self.loader]
        draw.shuffle(order)
        yield from torch.cat(order).split(4)


def endless() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.rand(2, generator=generator) + torch.rand(1)


def five() -> Iterator[Tensor]:
    for number in range(5):
        yield torch.full((2,), float(number)) + torch.rand(1)


def of_torchdata(kind: str) -> Any:
    from torchdata import nodes
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "generator":
        return StatefulDataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    if kind == "loader":
        return StatefulDataLoader(DATA, batch_size=4, shuffle=True)
    sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(3))
    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(sampler), 4))


KINDS: dict[str, Callable[[], Any]] = {
    "generators of its own": Counting,
    "a subclass": lambda: Changed(DATA, 4, shuffle=True),
    "a function": lambda: five,
    "an iterator": endless,
    "one iterator": Kept,
    "one iterator, wrapped": lambda: Wrapping(Repeating()),
    "one iterator, from the first pass on": Lazy,
    "an iterator of each pass": lambda: Left(DATA, 4, shuffle=True),
    "an iterator of each pass, with a worker": lambda: Left(DATA, 4, shuffle=True, num_workers=1),
    "a library's count": lambda: library().Counting(),
    "a user's count in a library's loader": lambda: library().Holding(Passes()),
    "a thread": lambda: InThread(DATA, 4, shuffle=True),
    "persistent workers": lambda: Wrapping(persistent()),
    "persistent workers, left early": lambda: Early(persistent(20)),
    "an iterable data set": lambda: Batches(),
    "state": Positioned,
    "a list": lambda: [torch.ones(2) * number for number in range(5)],
    "a range": lambda: range(5),
    **({f"torchdata, {kind}": lambda kind=kind: of_torchdata(kind) for kind in ("loader", "generator", "nodes")}),
}


def feed_of(kind: str, user: str = "Trainer", **options: Any) -> ResumableLoader:
    torch.manual_seed(5)
    if user == "Loop":
        settings = LoaderSettings(World(), TrainerOptions.model_validate({}), 7)
        return reader_of(KINDS[kind](), 0, settings, SingleProcess())
    limit = {"limit_train_batches": 5} if kind == "an iterator" else {}
    trainer = Trainer(max_epochs=1, seed=7, enable_progress_bar=False, **limit, **options)
    settings = LoaderSettings(trainer.strategy.data_world, trainer.options, 7)
    return LoaderResolver(settings, trainer.strategy.collective, None, train=KINDS[kind]()).training()


def rest(feed: ResumableLoader, epoch: int, start: int) -> list[Any]:
    found = []
    for number in range(epoch, EPOCHS):
        feed.set_at_end(False)
        found += [(number, batch) for batch in feed.batches(number, start if number == epoch else 0)]
    return found


#: who reads which kind; a pass of a Loop over an iterator would not end
ROWS = {kind: (kind, "Trainer") for kind in KINDS}
ROWS |= {f"{kind}, in a Loop": (kind, "Loop") for kind in KINDS if kind != "an iterator"}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize(("kind", "user"), ROWS.values(), ids=ROWS)
def test_a_loader_of_any_kind_continues_from_any_batch(kind: str, user: str) -> None:
    if "torchdata" in kind and find_spec("torchdata") is None:
        pytest.skip("torchdata is not installed")
    whole = feed_of(kind, user)
    read, states = list[Any](), list[Any]()
    for epoch in range(EPOCHS):
        whole.set_at_end(False)
        for number, batch in enumerate(whole.batches(epoch), 1):
            read.append((epoch, copy.deepcopy(batch)))
            encoded = encode(whole.state_dict())
            at = (epoch + 1, 0) if whole.at_end else (epoch, number)
            states.append((at, decode(encoded.document, encoded.tensors)))
    assert len(read) == 5 * EPOCHS
    for stop in (0, 3, 4, 5, 9, 12):
        again = feed_of(kind, user)
        at, state = states[stop]
        again.load_state_dict(state)
        again.restored()
        assert not differences(read[stop + 1 :], rest(again, *at)), stop
        again.close()
    whole.close()


class Told:
    """Adds to its last batches what training tells it."""

    def __init__(self, **options: Any) -> None:
        self.told, self.options = 0.0, options
        self.passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        yield from (self.batch(number) for number in range(5))

    def batch(self, number: int) -> Tensor:
        return torch.tensor([number + (self.told if number > 3 else 0.0), self.passes])


def test_attributes_that_do_not_change_are_written_once() -> None:
    def feed() -> Any:
        return LoaderResolver(settings, trainer.strategy.collective, None, train=Told(names=["a", "b"])).training()

    trainer = Trainer(max_epochs=1, enable_progress_bar=False)
    settings = LoaderSettings(trainer.strategy.data_world, trainer.options, 7)
    first, again = feed(), feed()
    next(first.batches(0))
    state = first.state_dict()
    assert [name for own in state["now"]["nodes"].values() for name in own["values"]] == ["passes"]
    again.load_state_dict(state)
    assert not differences(again.state_dict(), state)


class ToldStated(Told):
    """Says its position, which it keeps in two parts."""

    begun = read = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        self.read = 0
        while self.begun + self.read < 5:
            self.read += 1
            yield self.batch(self.begun + self.read - 1)
        self.begun = self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.begun + self.read) % 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state["at"]


class ToldKept(Told):
    """Continues one iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.iterator = (self.batch(number) for number in itertools.cycle(range(5)))

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self.iterator, 5)


def trained(whole: ResumableLoader, told: Any, at: tuple[int, int], tell: int) -> Iterator[tuple[Any, Any]]:
    """Yield batches and states of a training that tells the loader something after batch `tell`, and each epoch."""
    for epoch in range(at[0], 3):
        whole.set_at_end(False)
        start = at[1] if epoch == at[0] else 0
        for number, batch in enumerate(whole.batches(epoch, start), start + 1):
            told.told += 10.0 * (number == tell) + 100.0 * whole.at_end
            yield batch.tolist(), ((epoch, number) if not whole.at_end else (epoch + 1, 0), whole.state_dict())


#: kind -> numbers of batches after which a resume is refused, since it would read a changed batch again
NAMED: dict[type[Told], list[int]] = {Told: [4, 9, 14], ToldStated: [4, 9, 14], ToldKept: [*range(4, 15)]}


@pytest.mark.parametrize("tell", [1, 2, 3])
@pytest.mark.parametrize("kind", NAMED)
def test_a_change_by_training_within_a_pass_is_restored_or_named(
    kind: type[Told], tell: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "told", lambda: told)
    told = kind()
    expected = []
    for batch, (at, state) in trained(feed_of("told"), told, (0, 0), tell):
        encoded = encode(state)
        expected.append((batch, at, decode(encoded.document, encoded.tensors)))
    assert len({*map(str, (batch for batch, _, _ in expected))}) > 6
    named, messages = [], []
    for stop, (_, at, state) in enumerate(expected[:-1], 1):
        told = kind()
        again = feed_of("told")
        again.load_state_dict(state)
        try:
            found = [batch for batch, _ in trained(again, told, at, tell)]
        except NotExact as error:
            named.append(stop)
            words = (
                r"within the epoch \(told\)\."
                if stop == 4 or kind is not ToldKept
                else "gives other samples in epoch 0"
            )
            messages.append(re.search(words, str(error)))
        else:
            assert found == [batch for batch, _, _ in expected[stop:]], stop
    assert named == NAMED[kind]
    assert all(messages)


class Sharing:
    def __init__(self) -> None:
        self.samples = torch.zeros(3)

    def __iter__(self) -> Iterator[int]:
        yield 1


def test_memory_that_training_shares_within_a_pass_is_shared_after_a_resume() -> None:
    loader: Any = Sharing()
    state = whole_loader._LoaderState(loader)
    before = copy.deepcopy(state.state_dict())
    loader.view = loader.samples[1:]
    encoded = encode({"before": before, "now": whole_loader._changes_since(before, state.state_dict())})
    back, again = decode(encoded.document, encoded.tensors), Sharing()
    whole_loader._LoaderState(again).put_back(whole_loader._with_changes(back["before"], back["now"]))
    again.samples[1] = 4.0
    assert vars(again)["view"].tolist() == [4.0, 0.0]


def test_a_stream_that_does_not_repeat_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "unseeded", lambda: Batches(seed=None))
    with pytest.raises(NotExact, match="gives other samples when it is read again"):
        next(feed_of("unseeded").batches(0))


@pytest.mark.parametrize(
    ("kind", "warnings"),
    [
        ("one iterator", 1),
        ("one iterator, from the first pass on", 1),
        ("an iterator of each pass", 0),
        ("a function", 0),
    ],
)
def test_passes_that_a_resume_reads_again_are_named_once(
    kind: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(rest(feed_of(kind), 0, 0)) == 5 * EPOCHS
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert ("reads all batches of the run again" in caplog.text) == bool(warnings)


def test_a_state_of_a_loader_that_is_wrong_is_named_and_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "wrong", lambda: Positioned(wrong=True))
    whole = feed_of("wrong")
    batches = whole.batches(0)
    assert len([next(batches) for _ in range(4)]) == 4
    assert "its state_dict does not restore its position" in caplog.text
    again = feed_of("wrong")
    again.load_state_dict(whole.state_dict())
    assert not differences([*again.batches(0, 4)], [*batches])


def test_a_share_of_a_loader_that_says_its_length() -> None:
    assert len([*feed_of("a range", limit_train_batches=0.4).batches(0)]) == 2
    with pytest.raises(UserError, match="the training loader: a limit of"):
        feed_of("a function", limit_train_batches=0.4)


class Seeing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = list[list[float]]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch.flatten()[:1]).mean()


def test_a_generator_function_trains_as_in_a_plain_loop(caplog: pytest.LogCaptureFixture) -> None:
    def batches() -> Iterator[Tensor]:
        yield from torch.arange(12.0).split(3)

    module = Seeing()
    with caplog.at_level(logging.WARNING):
        Trainer(max_epochs=2, enable_progress_bar=False).fit(module, batches)
    assert module.seen == [batch.tolist() for _ in range(2) for batch in batches()]
    assert not caplog.records


@pytest.mark.parametrize("given", [5, [5, DataLoader(DATA)]])
def test_what_is_no_loader_is_named(given: Any) -> None:
    with pytest.raises(UserError, match="DataLoader"):
        Trainer(max_epochs=1, enable_progress_bar=False).fit(Net(), given)
