"""Loaders that are no plain DataLoaders: each continues from any batch, and gives what it gives by itself."""

import copy
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.config.options import TrainerOptions
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LoaderResolver, LoaderSettings
from midstride.engine.errors import UserError
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


@pytest.mark.parametrize(("kind", "warnings"), [("one iterator", 1), ("a subclass", 0), ("a function", 0)])
def test_passes_that_a_resume_reads_again_are_named_once(
    kind: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(rest(feed_of(kind), 0, 0)) == 5 * EPOCHS
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert ("reads all batches of the run again" in caplog.text) == bool(warnings)


def test_a_state_of_a_loader_that_is_wrong_is_named_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    KINDS["wrong"] = lambda: Positioned(wrong=True)
    try:
        whole = feed_of("wrong")
        batches = whole.batches(0)
        read = [next(batches) for _ in range(4)]
        assert "its state_dict does not bring it back to its place" in caplog.text
        again = feed_of("wrong")
        again.load_state_dict(whole.state_dict())
        assert not differences([*again.batches(0, 4)], [*batches])
        assert len(read) == 4
    finally:
        del KINDS["wrong"]


def test_a_share_of_a_loader_that_says_its_length() -> None:
    assert len([*feed_of("a range", limit_train_batches=0.4).batches(0)]) == 2
    with pytest.raises(UserError, match="the training loader: a limit of"):
        feed_of("a function", limit_train_batches=0.4)


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[list[float]]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch.flatten()[:1]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_generator_function_trains_as_in_a_plain_loop(caplog: pytest.LogCaptureFixture) -> None:
    def batches() -> Iterator[Tensor]:
        yield from torch.arange(12.0).split(3)

    module = Net()
    with caplog.at_level(logging.WARNING):
        Trainer(max_epochs=2, enable_progress_bar=False).fit(module, batches)
    assert module.seen == [batch.tolist() for _ in range(2) for batch in batches()]
    assert not caplog.records


@pytest.mark.parametrize("given", [5, [5, DataLoader(DATA)]])
def test_what_is_no_loader_is_named(given: Any) -> None:
    with pytest.raises(UserError, match="DataLoader"):
        Trainer(max_epochs=1, enable_progress_bar=False).fit(Net(), given)
