"""Samplers stay the objects they are, and an epoch's items outlive a death."""

import copy
import gc
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from support.nets import Net
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from midstride.engine import Trainer
from midstride.engine.data import StatefulDataLoader
from midstride.engine.data.dataloader_order import training_loader
from midstride.engine.data.drawn_items import as_items, pack_items, unpack_items
from midstride.engine.data.map_style import MapLoader
from midstride.engine.data.running_generator import RunningGenerator
from midstride.engine.data.sampler_order import SamplerOrder
from midstride.engine.data.sampler_state import SamplerState
from midstride.engine.errors import NotExact
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences, same_key_order
from midstride.engine.world import World

EPOCHS, SAMPLES, BATCH = 6, 24, 4


class Shown:
    """An item of a type that nothing writes; its text says nothing, or shows its address."""

    def __init__(self, index: int) -> None:
        self.index = index


class Vague(Shown):
    def __repr__(self) -> str:
        return "Vague"


class By(Sampler[Any]):
    """Ordered by `score`, which others hold too; each item made by `kind`."""

    def __init__(self, kind: Any = int) -> None:
        self.score, self.kind = list(range(SAMPLES)), kind

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        return iter([self.kind(index) for index in np.argsort(self.score, kind="stable").tolist()])


class Learner(Net):
    """Writes the weights of a sampler while it trains."""

    lr = 0.0

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights, self.seen = [weights], list[int]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch.reshape(-1)
        self.seen += batch.tolist()
        write(self.weights[0], batch)
        return super().training_step([batch[:, None].float()], batch_idx)


def write(weights: Tensor, batch: Tensor) -> None:
    weights[batch[batch % 6 == 0]] = 50.0


def weighted() -> Any:
    generator = torch.Generator().manual_seed(3)
    return WeightedRandomSampler(torch.ones(SAMPLES, dtype=torch.double), SAMPLES, generator=generator)


def test_importance_sampling_draws_what_plain_pytorch_draws() -> None:
    sampler, expected = weighted(), list[int]()
    for _ in range(EPOCHS):
        for batch in DataLoader(range(SAMPLES), BATCH, sampler=sampler):  # type: ignore[arg-type,var-annotated]
            expected += batch.tolist()
            write(sampler.weights, batch)
    assert sum(index % 6 == 0 for index in expected) > EPOCHS * SAMPLES // 2
    sampler = weighted()
    module = Learner(sampler.weights)
    loader: Any = DataLoader(range(SAMPLES), BATCH, sampler=sampler)  # type: ignore[arg-type]
    Trainer(max_epochs=EPOCHS, enable_progress_bar=False).fit(module, loader)
    assert module.seen == expected


class DrawnAtOnce(Sampler[Any]):
    """Items drawn where it is asked for an iterator, not for the first item; of `size` each, if any."""

    def __init__(self, generator: torch.Generator, size: int = 0) -> None:
        self.generator, self.size = generator, size

    def __len__(self) -> int:
        return SAMPLES // (self.size or 1)

    def __iter__(self) -> Iterator[Any]:
        drawn = torch.randperm(SAMPLES, generator=self.generator)
        return iter(drawn.view(-1, self.size).tolist() if self.size else drawn.tolist())


#: who draws from the generator of the loader -> the loader's options
SHARED: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "shuffled": lambda g: {"batch_size": BATCH, "shuffle": True},
    "with replacement": lambda g: {
        "batch_size": BATCH,
        "sampler": RandomSampler(range(SAMPLES), replacement=True, generator=g),
    },
    "a subset": lambda g: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(8), generator=g)},
    "one by one": lambda g: {"batch_size": None, "sampler": RandomSampler(range(SAMPLES), generator=g)},
    "batches": lambda g: {"batch_sampler": BatchSampler(RandomSampler(range(SAMPLES), generator=g), BATCH, False)},
    "drawn at once": lambda g: {"batch_size": BATCH, "sampler": DrawnAtOnce(g)},
    "drawn at once, one by one": lambda g: {"batch_size": None, "sampler": DrawnAtOnce(g)},
    "drawn at once, batches": lambda g: {"batch_sampler": DrawnAtOnce(g, BATCH)},
    "workers": lambda g: {"batch_size": BATCH, "shuffle": True, "num_workers": 1},
    "workers that stay": lambda g: {"batch_size": BATCH, "shuffle": True, "num_workers": 1, "persistent_workers": True},
}


def _loader(who: str, kind: Any = DataLoader) -> Any:
    generator, samples = torch.Generator().manual_seed(3), torch.arange(SAMPLES)
    return kind(samples, generator=generator, **SHARED[who](generator))


def _epochs(loader: Any) -> list[list[int]]:
    return [[index for batch in loader for index in batch.flatten().tolist()] for _ in range(3)]


def _fitted(loader: Any) -> list[int]:
    module = Learner(torch.ones(SAMPLES))
    Trainer(max_epochs=3, enable_progress_bar=False).fit(module, loader)
    return module.seen


@pytest.mark.parametrize("who", SHARED)
def test_a_loaders_generator_gives_the_order_of_pytorch(who: str) -> None:
    first, second, third = _epochs(_loader(who))
    assert first != second != third != first
    assert _fitted(_loader(who)) == first + second + third
    gc.collect()  # workers that stay do so as long as their loader


WORKERS = ["shuffled", "workers", "workers that stay"]


@pytest.mark.parametrize("begun", WORKERS)
@pytest.mark.parametrize("goes_on", WORKERS)
def test_the_order_stays_that_of_the_workers_a_run_began_with(begun: str, goes_on: str) -> None:
    """Torch draws their seed from the loader's generator in each epoch, and once for workers that stay."""
    whole = _epochs(_loader(begun, StatefulDataLoader))
    first, second = (_loader(who, StatefulDataLoader) for who in (begun, goes_on))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert _epochs(second) == [whole[0][BATCH:], *whole[1:]]


ITEMS: dict[str, list[Any]] = {
    "small": [0, 255, 3],
    "larger": [0, 70_000],
    "largest": [0, 2**40],
    "negative": [-1, 200],
    "batches": [[1, 2], [3], [], [70_000]],
    "numpy": [np.int64(3), np.int64(4)],
    "tensors": [torch.tensor(3), torch.tensor(4)],
    "tuples": [(1, "a"), (2, "b")],
    "names": ["a", "b"],
    "bool": [True, 0],
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_come_back_as_they_were(name: str) -> None:
    encoded = encode(pack_items(as_items(ITEMS[name])))
    found = unpack_items(decode(encoded.document, encoded.tensors))
    assert not differences(ITEMS[name], found if isinstance(found, list) else found.tolist())


def sampled(sampler: Any) -> SamplerOrder:
    return SamplerOrder(sampler, DataLoader(range(SAMPLES)), 5, "train")  # type: ignore[arg-type]


def items(order: SamplerOrder) -> list[Any]:
    """Return all items of the epoch that is open."""
    return order.indices_at(np.arange(len(order)))


def resumed(first: SamplerOrder, sampler: Any, epoch: int = 0) -> SamplerOrder:
    """Return the sequence of another life, in the middle of an epoch of `first`."""
    encoded = encode(first.state_dict())
    again = sampled(sampler)
    again.load_state_dict(decode(encoded.document, encoded.tensors))
    assert not differences(first.state_dict(), again.state_dict())
    again.open(epoch, resumed=True)
    return again


def test_items_outlive_a_sampler_that_would_give_others() -> None:
    sampler = By()
    first = sampled(sampler)
    first.open(0, resumed=False)
    before = items(first)
    sampler.score.reverse()
    again = By()
    second = resumed(first, again)
    assert items(second) == before
    assert again.score == sampler.score
    second.open(1, resumed=False)
    first.open(1, resumed=False)
    assert items(second) == items(first) != before


@pytest.mark.parametrize("kind", [Shown, Vague])
@pytest.mark.parametrize("epoch", [0, 1])
def test_items_that_cannot_be_written_are_found_again_or_refused(kind: type[Shown], epoch: int) -> None:
    built = By(kind)
    first = sampled(built)
    first.open(0, resumed=False)
    built.score.reverse()
    first.open(epoch, resumed=False)
    before = [item.index for item in items(first)]
    for item in items(first):  # as a data set may, which is given them
        item.cache = [item.index]
    assert [item.index for item in items(resumed(first, By(kind), epoch))] == before
    other = By(kind)
    state = copy.deepcopy(first.state_dict())
    again = sampled(other)
    again.load_state_dict(state)
    other.kind = lambda index: kind(-index)
    with pytest.raises(NotExact, match=r"By gives another order in epoch . than before the run died .* plain numbers"):
        again.open(epoch, resumed=True)


class Deep(Sampler[int]):
    """Holds everything in objects, containers and slots."""

    class Table:
        __slots__ = ("numbers", "tensor")

        def __init__(self) -> None:
            self.numbers, self.tensor = {"a": [1, 2], "b": deque([1], maxlen=3)}, torch.zeros(3)

    def __init__(self) -> None:
        self.table, self.parts, self.array = Deep.Table(), [Deep.Table(), torch.Generator()], np.zeros(2)

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_a_sampler_holds_is_filled_in_place() -> None:
    sampler, other = Deep(), Deep()
    state, live = SamplerState(sampler, None), SamplerState(other, None)
    sampler.table.numbers["a"].append(5)
    sampler.table.numbers["c"] = [7]  # type: ignore[assignment]
    sampler.table.numbers["b"].append(2)
    sampler.table.tensor += 2
    sampler.parts[0].tensor += 1
    torch.rand(1, generator=sampler.parts[1])
    sampler.array[1] = 3
    table = other.table
    held = [table.numbers, table.numbers["a"], table.numbers["b"], table.tensor, other.parts[0].tensor, other.array]
    encoded = encode(state.changes())
    live.restore(decode(encoded.document, encoded.tensors))
    assert not differences(live.full(), state.full())
    now = [table.numbers, table.numbers["a"], table.numbers["b"], table.tensor, other.parts[0].tensor, other.array]
    assert [*map(id, held)] == [*map(id, now)]
    live.restore({})
    assert not differences(live.full(), SamplerState(Deep(), None).full())


class Bucketed(Sampler[int]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


#: what a sampler holds, and what becomes of it that `==` may not see
BECOMES = {
    "another number, deep": ([[1, 2], [3, (4, 5)]], [[1, 2], [3, (4, 6)]]),
    "a bool": ([[1, 2]], [[True, 2]]),
    "a float": ({"a": [1]}, {"a": [1.0]}),
    "another sign of zero": ([0.0], [-0.0]),
    "another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "an element of an array": ([np.zeros(2)], [np.array([0.0, 1.0])]),
    "an element of a tensor": ({"a": torch.zeros(2)}, {"a": torch.tensor([0.0, 1.0])}),
    "a long list": ([0] * 20_000, [0] * 19_999 + [1]),
}


@pytest.mark.parametrize("name", BECOMES)
def test_a_change_is_seen_at_whichever_snapshot_it_comes(name: str) -> None:
    built, becomes = BECOMES[name]
    sampler = Bucketed(copy.deepcopy(built))
    state = SamplerState(sampler, None)
    for _ in range(3):
        assert state.changes() == {}
        sampler.held = copy.deepcopy(built)
    for _ in range(2):
        sampler.held = copy.deepcopy(becomes)
        [changed] = state.changes().values()
        assert not differences(changed, becomes)
        assert same_key_order(changed, becomes)
        sampler.held = copy.deepcopy(built)
        assert state.changes() == {}


class Forever(Sampler[int]):
    """Does not end; each pass starts over, with a generator that only the pass holds."""

    def __init__(self, batch: int = 0) -> None:
        self.batch, self.passes = batch, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        generator = torch.Generator().manual_seed(self.passes)
        while True:
            order = torch.randperm(SAMPLES, generator=generator).tolist()
            yield from (order[at : at + self.batch] for at in range(0, SAMPLES, self.batch)) if self.batch else order


def endless(kind: str, rank: int = 0, ranks: int = 1, workers: int = 0) -> tuple[Any, MapLoader]:
    """Return a loader over a sampler that does not end, and what a rank reads of it."""
    sampling = {"batch_sampler": Forever(3)} if kind == "batches" else {"sampler": Forever(), "batch_size": BATCH}
    loader: Any = DataLoader(range(SAMPLES), num_workers=workers, **sampling)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {"seed": 5, "shard": ranks > 1, "limit": 1.0}
    return loader, training_loader(loader, World(rank=rank, size=ranks), **arguments)


@pytest.mark.parametrize("kind", ["items", "batches"])
def test_an_endless_sampler_is_drawn_in_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstride.engine.data.sampler_order.BLOCK", 30)
    plain, whole = endless(kind)
    assert whole.endless is not None
    batches = [batch.tolist() for batch in islice(plain, 40)]
    drawn = [index for batch in batches for index in batch]
    for rank, ranks, start in ((0, 1, 0), (0, 1, 19), (1, 2, 7)):
        first, again = endless(kind, rank, ranks)[1], endless(kind, rank, ranks)[1]
        begun = first.batches(0)
        for _ in range(start):
            next(begun)
        encoded = encode(first.state_dict())
        again.load_state_dict(decode(encoded.document, encoded.tensors))
        found = [batch.tolist() for batch in islice(again.batches(0, start), 20 - start)]
        if kind == "batches":
            assert found == batches[rank::ranks][start:20]
        else:
            assert [index for batch in found for index in batch] == drawn[rank::ranks][start * BATCH : 20 * BATCH]


def test_an_endless_sampler_holds_a_bounded_number_of_indices() -> None:
    _, read = endless("items")
    order: Any = read.order.sequence
    order.open(0, resumed=False)
    held = 0
    for request in islice(read.order.requests(0, 0), 1_000_000 // BATCH):
        held = max(held, len(order._items.kept) + len(order._items.head))
        assert len(request.indices) == BATCH
    assert order._items.end >= 1_000_000
    assert held <= 4 * 16_384


class MakesLate(Sampler[int]):
    """Makes its generator in its first pass."""

    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator().manual_seed(3)
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


def test_a_sampler_that_makes_its_generator_late_is_restored() -> None:
    first = sampled(MakesLate())
    first.open(0, resumed=False)
    again = resumed(first, MakesLate())
    for epoch in (1, 2):
        first.open(epoch, resumed=False)
        again.open(epoch, resumed=False)
        assert items(again) == items(first)


class Late(By):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


@pytest.mark.parametrize(("kind", "told"), [(Late, 1), (By, 0)])
def test_a_sampler_changed_within_an_epoch_is_named_once(
    kind: type[By], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = kind()
    sequence = sampled(sampler)
    for epoch in range(3):
        sampler.score.reverse()  # between two epochs, which the next one reads
        sequence.open(epoch, resumed=False)
        assert not caplog.records or epoch == 2
        if epoch:
            sampler.score.reverse()
        sequence.close()
    assert sum("take effect with the next one" in record.getMessage() for record in caplog.records) == told


class OnOneIterator(Sampler[int]):
    """Makes an iterator when it is first run, and continues it in each epoch; nothing restores a large one."""

    def __init__(self) -> None:
        self.iterator: Iterator[int] | None = None

    def __iter__(self) -> Iterator[int]:
        self.iterator = iter([*range(5)] * 10_000) if self.iterator is None else self.iterator
        return islice(self.iterator, 7)


def test_a_sampler_on_an_unrestored_iterator_is_refused() -> None:
    with pytest.raises(NotExact, match="gives another order when it runs again"):
        StatefulDataLoader(range(5), 2, sampler=OnOneIterator()).state_dict()


class Infinite(Sampler[int]):
    """Draws from a generator that it makes in `__init__`, of one of several forms, as that of mmengine does."""

    def __init__(self, form: str) -> None:
        self.seed, self.generator = 3, torch.Generator().manual_seed(4)

        def closure(*more: int, step: int, **options: int) -> Iterator[int]:
            while True:
                yield from (step * index for index in range(self.seed + more[0] + options["last"]))

        forms = {"method": self.drawn, "closure": lambda: closure(1, step=2, last=1), "held": self.held}
        self.indices = forms[form]()

    def drawn(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(5, generator=generator).tolist()

    def held(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(5, generator=self.generator).tolist()

    def __iter__(self) -> Iterator[int]:
        yield from self.indices


@pytest.mark.parametrize("form", ["method", "closure"])
def test_a_generator_made_with_its_sampler_is_drawn_again(form: str) -> None:
    whole = StatefulDataLoader(range(50), 2, sampler=Infinite(form))
    found, states = [], []
    for batch in islice(whole, 9):
        found.append(batch.tolist())
        states.append(copy.deepcopy(whole.state_dict()))
    assert [index for batch in found for index in batch] == [*islice(Infinite(form).indices, 18)]
    for stop in (1, 5, 8):
        again = StatefulDataLoader(range(50), 2, sampler=Infinite(form))
        again.load_state_dict(states[stop - 1])
        assert [batch.tolist() for batch in islice(again, 9 - stop)] == found[stop:]


class Item:
    """An index whose text shows its address."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __index__(self) -> int:
        return self.index


def test_items_of_a_generator_are_compared_by_content() -> None:
    generator = RunningGenerator(lambda: map(Item, range(9)), ([], {}))  # type: ignore[arg-type]
    again = copy.deepcopy(generator)
    assert [next(generator).index for _ in range(4)] == [0, 1, 2, 3]
    again.load_state_dict(generator.state_dict())
    assert (generator.send(None).index, next(again).index) == (4, 4)
    for change in (lambda: generator.send(1), lambda: generator.throw(ValueError())):
        with pytest.raises(NotExact, match=r"is controlled by (send|throw)\(\)"):
            change()


def test_a_generator_can_be_a_batch_sampler() -> None:
    def batches() -> Iterator[list[int]]:
        for size in (3, 1, 4, 2):
            yield [*range(size)]

    whole = StatefulDataLoader(range(5), batch_sampler=batches())
    first = next(iter(whole)).tolist()
    rest = StatefulDataLoader(range(5), batch_sampler=batches())
    rest.load_state_dict(whole.state_dict())
    assert [first, *(batch.tolist() for batch in rest)] == [*batches()]
    assert [*rest] == []  # as in plain PyTorch


def test_a_generator_on_a_generator_that_others_draw_from_is_named() -> None:
    with pytest.raises(NotExact, match=r"gives another order|gives other items than before"):
        StatefulDataLoader(range(50), 2, sampler=Infinite("held")).state_dict()


class Running(Sampler[int]):
    """Draws from a generator over an iterator, which cannot begin again."""

    def __init__(self, ends: bool) -> None:
        self.indices = (index % 5 for index in (range(20) if ends else count()))

    def __iter__(self) -> Iterator[int]:
        yield from self.indices


@pytest.mark.parametrize(
    ("sampler", "name"),
    [(Running(True), "indices"), (Running(False), "indices"), (Running(True).indices, "<genexpr>")],
)
def test_a_sampler_made_with_a_running_generator_is_named(sampler: Any, name: str) -> None:
    with pytest.raises(NotExact, match=f"holds a running generator, {name}, which cannot be restored"):
        StatefulDataLoader(range(5), 2, sampler=sampler).state_dict()
