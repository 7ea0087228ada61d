"""`StatefulDataLoader`: a new loader, given a state, reads what the old one would have read next."""

import io
import json
import math
import pickle
from abc import ABC
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from midstride.engine.data import StatefulDataLoader
from midstride.engine.errors import NotExact, UserCodeError, UserError, WorldError

SAMPLES, BATCH = 22, 4
BATCHES = math.ceil(SAMPLES / BATCH)


class Noisy(Dataset[Tensor]):
    """Samples that say who they are, with numbers from the three generators that samples draw from."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), np.random.rand()])


class Counting(Sampler[int]):
    """Its order turns with each epoch, by a counter of its own."""

    def __init__(self) -> None:
        self.epochs = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter([(index + self.epochs) % SAMPLES for index in range(SAMPLES)])


class Placed(Sampler[int]):
    """Says its place in an epoch; it was run once before a loader gets it."""

    def __init__(self) -> None:
        self.given, self.skip = 0, 0
        assert len([*self]) == SAMPLES

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.given, self.skip = self.skip, 0
        for index in range(self.given, SAMPLES):
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skip = state_dict["given"]


class Stream(IterableDataset[Tensor]):
    """Samples without a state."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(index), torch.rand(()).item()]) for index in range(SAMPLES))


class Cursor(IterableDataset[Tensor]):
    """A stream that is its own iterator, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.at = 0
        return self

    def __next__(self) -> Tensor:
        if self.at == SAMPLES:
            raise StopIteration
        self.at += 1
        return torch.tensor([float(self.at), torch.rand(()).item()])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def seeded_with(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


#: what is read -> how to make a loader of it, whose number of workers is given
LOADERS: dict[str, Any] = {
    "in order": lambda **given: StatefulDataLoader(Noisy(), BATCH, **given),
    "shuffled": lambda **given: StatefulDataLoader(Noisy(), BATCH, shuffle=True, seed=3, **given),
    "drop_last": lambda **given: StatefulDataLoader(Noisy(), BATCH, True, drop_last=True, **given),
    "weighted": lambda **given: StatefulDataLoader(
        Noisy(), BATCH, sampler=WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1).tolist(), SAMPLES), **given
    ),
    "a sampler that counts": lambda **given: StatefulDataLoader(Noisy(), BATCH, sampler=Counting(), **given),
    "weighted by a generator": lambda **given: StatefulDataLoader(
        Noisy(), BATCH, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 20, generator=seeded_with(3)), **given
    ),
    "a sampler that was run": lambda **given: StatefulDataLoader(Noisy(), BATCH, sampler=Placed(), **given),
    "one by one": lambda **given: StatefulDataLoader(Noisy(), batch_size=None, shuffle=True, **given),
    "rng of batches": lambda **given: StatefulDataLoader(Noisy(), BATCH, True, rng="batch", **given),
    "a stream": lambda **given: StatefulDataLoader(Stream(), BATCH, **given),
    "a stream with a state": lambda **given: StatefulDataLoader(Cursor(), BATCH, **given),
}


def shown(batches: Any) -> list[list[float]]:
    return [torch.as_tensor(batch).flatten().tolist() for batch in batches]


def passed_on(loader: StatefulDataLoader[Any]) -> Any:
    """Return its state as a checkpoint gives it back."""
    return pickle.loads(pickle.dumps(loader.state_dict()))


@pytest.mark.parametrize("name", LOADERS)
def test_three_epochs_read_in_many_lives_are_those_of_one(name: str):
    """Each life reads three batches, or to the end of its epoch, and every other one has two workers."""
    make = LOADERS[name]
    expected = [shown(epoch) for loader in [make()] for epoch in (loader, loader, loader)]
    assert len(expected[0]) > 4
    assert expected[0] != expected[1], "every one of them draws"
    found: list[list[list[float]]] = [[], [], []]
    state, ends, life = None, 0, 0
    while ends < 3:
        workers = 2 * (life % 2) if "a stream" not in name else 0
        loader = make(num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        read = shown(islice(batches, 3))
        found[ends] += read
        if len(read) < 3:  # the epoch has ended; its state begins the next one
            ends += 1
        state, life = passed_on(loader), life + 1
    assert found == expected


def as_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def as_weights(state: Any) -> Any:
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kept", [as_json, as_weights])
@pytest.mark.parametrize("name", LOADERS)
def test_a_state_may_be_kept_as_json_or_with_weights(name: str, kept: Any):
    loader = LOADERS[name]()
    batches = iter(loader)
    next(batches), next(batches)
    again = LOADERS[name]()
    again.load_state_dict(kept(loader.state_dict()))
    assert [*map(shown, (again, again))] == [shown(batches), shown(loader)]


def test_a_distributed_sampler_gives_its_own_share():
    read = []
    for kind in (DataLoader, StatefulDataLoader):
        sampler = DistributedSampler(range(SAMPLES), 4, 1, drop_last=True)
        loader = kind(range(SAMPLES), 2, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            read.append(shown(loader))
    assert len(read[0]) == 3
    assert read[:2] == read[2:]


class Sized(Stream):
    """Says its length."""

    def __len__(self) -> int:
        return SAMPLES


def test_a_stream_that_says_its_length_gives_one_to_its_loader():
    assert len(StatefulDataLoader(Sized(), BATCH)) == BATCHES
    with pytest.raises(TypeError):
        len(StatefulDataLoader(Stream(), BATCH))


class Nested(Noisy):
    """Holds a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def expect_nested(_: int) -> None:
    info: Any = get_worker_info()
    assert type(info.dataset) is Nested


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_workers_get_the_data_set_itself():
    loader = StatefulDataLoader(Nested(), BATCH, num_workers=1, worker_init_fn=expect_nested)
    assert len(shown(loader)) == BATCHES


class Abstract(RuntimeError, ABC):
    """An error whose class has a class of its own."""


@pytest.mark.parametrize("cause", [RuntimeError, Abstract])
def test_an_error_of_torch_keeps_its_class(cause: type[Exception]):
    error = WorldError("DataLoader timed out after 1 seconds")
    error.__cause__ = cause("timed out")
    found = error.as_instance_of_cause()
    assert isinstance(found, cause)
    assert isinstance(found, WorldError)
    assert type(pickle.loads(pickle.dumps(found))) is WorldError
    if cause is RuntimeError:
        assert pickle.loads(pickle.dumps(type(found))).__bases__ == (WorldError, cause)  # torch sends the class


class Unreadable(Noisy):
    """Its third sample raises an error."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__({0: 0, 1: 1}[index])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_is_found_by_the_class_of_its_cause(workers: int):
    loader = StatefulDataLoader(Unreadable(), 1, num_workers=workers)
    with pytest.raises(KeyError, match="reading samples") as found:
        deque(loader, maxlen=0)
    assert isinstance(found.value, UserCodeError)


@pytest.mark.parametrize("workers", [0, 2])
def test_ends_of_an_epoch(workers: int):
    loader = StatefulDataLoader(Noisy(), BATCH, shuffle=True, num_workers=workers)
    for _ in loader:
        before = passed_on(loader)
    after = passed_on(loader)
    expected = shown(loader)
    for state, read in ((before, []), (after, expected)):
        again = StatefulDataLoader(Noisy(), BATCH, shuffle=True, num_workers=workers)
        again.load_state_dict(state)
        assert passed_on(again) == state
        assert shown(again) == read
    again.load_state_dict(before)
    assert [shown(again), shown(again)] == [[], expected], "the rest, which is nothing, and the next epoch"


def test_a_pass_cut_short_is_an_epoch_and_set_epoch_selects_it():
    loader = StatefulDataLoader(Noisy(), BATCH, shuffle=True)
    first, second = shown(loader), shown(loader)
    loader = StatefulDataLoader(Noisy(), BATCH, shuffle=True)
    next(iter(loader))
    assert shown(loader) == second
    loader.set_epoch(0)
    assert shown(loader) == first
    batches = iter(loader)
    next(batches)
    loader.set_epoch(1)  # what Lightning and Accelerate say at each start: it keeps a position that was loaded
    state = passed_on(loader)
    assert (state["epoch"], state["batch"]) == (1, 0)
    loader.load_state_dict({**state, "batch": 2})
    loader.set_epoch(1)
    assert shown(loader) == second[2:]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_may_be_loaded_while_a_pass_is_under_way(persistent: bool):
    loader = StatefulDataLoader(Noisy(), BATCH, shuffle=True, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    next(batches)
    state, rest = passed_on(loader), shown(batches)
    other = iter(loader)
    next(other)
    loader.load_state_dict(state)
    assert shown(loader) == rest


def test_the_distributed_order_leaves_generators_alone():
    sampler: DistributedSampler[Any] = DistributedSampler(Noisy(), num_replicas=1, rank=0, seed=5)
    loader = StatefulDataLoader(Noisy(), BATCH, shuffle=True, seed=5)
    before = torch.get_rng_state()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        plain = DataLoader(Noisy(), BATCH, sampler=[*sampler])
        assert [batch[:, 0].tolist() for batch in loader] == [batch[:, 0].tolist() for batch in plain]
        torch.set_rng_state(before)
    shown(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 12), (2, 6), (4, 3), (3, 2), (1, 6)])
def test_another_number_of_ranks_reads_the_remaining_samples(ranks: int, batch_size: int):
    """Three ranks of four samples stop after two batches each: 24 of 48 samples are left, with their numbers."""

    def made(rank: int, size: int, samples: int) -> StatefulDataLoader[Tensor]:
        return StatefulDataLoader(Noisy(48), samples, shuffle=True, seed=1, num_replicas=size, rank=rank)

    states, rest = [], []
    for rank in range(3):
        loader = made(rank, 3, 4)
        batches = iter(loader)
        next(batches), next(batches)
        states.append(passed_on(loader))
        rest += [sample for batch in batches for sample in batch.tolist()]
    assert states[0] == states[1] == states[2]
    found = []
    for rank in range(ranks):
        loader = made(rank, ranks, batch_size)
        loader.load_state_dict(states[0])
        found += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(found) == sorted(rest)
    assert len(found) == 24


def test_the_state_is_small():
    loader = StatefulDataLoader(Noisy(1_000_000), BATCH, shuffle=True)
    next(iter(loader))
    assert len(pickle.dumps(loader.state_dict())) < 1024


REFUSED: dict[str, tuple[Any, str]] = {
    "other data": (lambda: StatefulDataLoader(Noisy(23), BATCH, shuffle=True), "with samples=22, this loader has 23"),
    "another seed": (lambda: StatefulDataLoader(Noisy(), BATCH, shuffle=True, seed=9), "seed=0, this loader has 9"),
    "no shuffle": (lambda: StatefulDataLoader(Noisy(), BATCH), "shuffle=True, this loader has False"),
    "another rng": (lambda: StatefulDataLoader(Noisy(), BATCH, True, rng="batch"), "rng='lazy'"),
    "batches that do not end there": (
        lambda: StatefulDataLoader(Noisy(), 5, shuffle=True),
        "is from after 8 samples of its epoch (2 batches of 4 over all ranks), and batches of 5 do not end there",
    ),
    "a stream": (lambda: StatefulDataLoader(Stream(), BATCH), "with batch_size=None, this loader has 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_of_other_samples_is_refused_before_a_load(name: str):
    make, said = REFUSED[name]
    loader = StatefulDataLoader(Noisy(), BATCH, shuffle=True)
    batches = iter(loader)
    next(batches), next(batches)
    other = make()
    before = passed_on(other)
    with pytest.raises(NotExact) as caught:
        other.load_state_dict(passed_on(loader))
    assert said in str(caught.value)
    assert passed_on(other) == before
    assert len(shown(other)) > 0


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: StatefulDataLoader(Noisy(), rank=1), "num_replicas=None and rank=1: give both"),
        (lambda: StatefulDataLoader(Noisy(0)).state_dict(), "has length 0"),
        (lambda: StatefulDataLoader(Noisy()).load_state_dict({"_snapshot": 1}), r"it has \['_snapshot'\]"),
    ],
)
def test_what_cannot_be_is_named(act: Any, said: str):
    with pytest.raises(UserError, match=said):
        act()


def test_batches_that_are_dealt_whole_keep_their_ranks():
    class Pairs(Sampler[list[int]]):
        def __len__(self) -> int:
            return SAMPLES // 2

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[i, i + 1] for i in range(0, SAMPLES, 2)])

    def made(size: int) -> StatefulDataLoader[Tensor]:
        return StatefulDataLoader(Noisy(), batch_sampler=Pairs(), num_replicas=size, rank=0)

    loader = made(2)
    next(iter(loader))
    with pytest.raises(NotExact, match="2 ranks took the state, this is one of 3: the batches of its Pairs"):
        made(3).load_state_dict(passed_on(loader))
