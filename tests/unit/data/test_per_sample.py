"""Random numbers in the data: functions of the position, whichever process reads it; others are not touched."""

import logging
import os
import queue
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from midstride.engine.data.dataloader_order import training_loader
from midstride.engine.data.map_style import MapLoader
from midstride.engine.data.rng.repeatability import is_repeatable
from midstride.engine.errors import NotExact
from midstride.engine.seeds import Generators, mix, rank_seed
from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks
from midstride.engine.world import World

SOURCES: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "random": random.random,
    "numpy's gaussian": lambda: float(np.random.normal()),
    "random's gaussian": lambda: random.gauss(0.0, 1.0),
    "none": lambda: 0.0,
}


class Drawn(Dataset[list[float]]):
    """Draws for every sample, or only from one sample on."""

    def __init__(self, draw: Callable[[], float], first: int = 0) -> None:
        self.draw, self.first = draw, first

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), self.draw() if index >= self.first else 0.0]


class Noisy:
    """A collate that draws, too."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [samples, self.draw()]


def loader(source: str, *, first: int = 0, rank: int = 0, size: int = 1, **options: Any) -> MapLoader:
    draw = SOURCES[source]
    plain = DataLoader(Drawn(draw, first), 4 // size, shuffle=True, collate_fn=Noisy(draw), **options)
    return training_loader(plain, World(rank=rank, size=size), seed=5, shard=size > 1, limit=1.0)


@pytest.mark.parametrize("source", SOURCES)
def test_one_seed_for_a_batch_reads_every_sample_once(source: str) -> None:
    reads: list[int] = []
    draw = SOURCES[source]

    def counted() -> float:
        reads.append(1)
        return draw()

    def batches(start: int) -> list[Any]:
        plain = DataLoader(Drawn(counted), 4, shuffle=True, collate_fn=Noisy(draw))
        return list(training_loader(plain, World(), seed=5, shard=False, limit=1.0, rng="batch").batches(1, start))

    whole = batches(0)
    assert len(reads) == 23
    assert batches(2) == whole[2:]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("first", [0, 20])
def test_batches_are_functions_of_their_place(source: str, first: int) -> None:
    whole = list(loader(source, first=first).batches(1))
    for start in range(len(whole)):
        assert list(loader(source, first=first).batches(1, start)) == whole[start:]
    if source != "none":
        values = [sample[1] for batch in whole for sample in batch[0] if sample[0] >= first]
        assert len(set(values)) == len(values)
        assert not {batch[1] for batch in whole} & set(values), "collate has numbers of its own"
        again = {sample[0]: sample[1] for batch in loader(source, first=first).batches(2) for sample in batch[0]}
        assert not {again[index] for index in again if index >= first} & set(values), "numbers of another epoch"


def test_hidden_random_draws_for_few_samples_are_refused() -> None:
    plain: Any = DataLoader(Drawn(lambda: float(os.urandom(1)[0]) + os.urandom(1)[0] / 256, first=21), 4, shuffle=True)
    with pytest.raises(NotExact, match=r"Drawn\[2[12]\] gave another sample when it was read again"):
        list(training_loader(plain, World(), seed=5, shard=False, limit=1.0).batches(0))


def test_seeds_are_those_of_splitmix64() -> None:
    # What the reference gives for the seed 1234567 (https://prng.di.unimi.it/splitmix64.c).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix(1234567, number) for number in range(4)] == expected
    assert [rank_seed(1234567, rank) for rank in range(4)] == expected


class ByMany:
    """Has only `__getitems__`; its samples refer to themselves."""

    def __len__(self) -> int:
        return 23

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = [{"index": index, "value": random.random()} for index in indices]
        for sample in samples:
            sample["itself"] = [sample]
        return samples


def test_getitems_reads_each_sample_by_its_own_seed() -> None:
    def read(start: int) -> list[Any]:
        plain: DataLoader[Any] = DataLoader(ByMany(), 4, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
        exact = training_loader(plain, World(), seed=5, shard=False, limit=1.0)
        return [[(sample["index"], sample["value"]) for sample in batch] for batch in exact.batches(1, start)]

    whole = read(0)
    assert len({value for batch in whole for _, value in batch}) == 23
    assert read(3) == whole[3:]


class WorkerSeeds(Dataset[int]):
    """Gives the seed that its worker was started with."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        worker: Any = get_worker_info()
        return int(worker.seed)


def _seeds_of_workers() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        plain = DataLoader(WorkerSeeds(), 2, num_workers=1, collate_fn=list)
        found.append(list(training_loader(plain, World(), seed=5, shard=False, limit=1.0).batches(0)))
    assert found[0] == found[1]


def test_workers_start_alike_wherever_the_main_generators_stand() -> None:
    assert run_ranks(_seeds_of_workers) == [0]


def test_another_number_of_ranks_reads_the_same_samples() -> None:
    alone = {sample[0]: sample[1] for batch in loader("torch").batches(0) for sample in batch[0]}
    for size in (2, 4):
        shared = [s for r in range(size) for batch in loader("torch", rank=r, size=size).batches(0) for s in batch[0]]
        padding = -23 % size
        assert sum(alone[sample[0]] == sample[1] for sample in shared) == len(shared) - padding


@pytest.mark.parametrize("source", SOURCES)
def test_the_main_generators_are_left_alone(source: str) -> None:
    np.random.normal(), random.gauss(0, 1)  # a second gaussian waits in both
    before = Generators().state_dict()
    batches = loader(source).batches(0)
    for _ in range(3):
        next(batches)
        assert not differences(before, Generators().state_dict())
    np.random.rand(), torch.rand(1), random.random()  # the training step draws in between
    before = Generators().state_dict()
    list(batches)
    assert not differences(before, Generators().state_dict())


def test_a_batch_collated_twice_is_copied_without_its_base_data() -> None:
    rows, found_bytes = torch.zeros(10_000, 8), queue.SimpleQueue[int]()  # what a list holds would be put back

    def collate(samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        for sample in samples:
            found_bytes.put(sample["row"].untyped_storage().nbytes())
        return torch.stack([sample["row"] for sample in samples])

    data: Any = [{"row": row} for row in rows[:8]]
    plain = DataLoader(data, 4, collate_fn=collate)
    next(training_loader(plain, World(), seed=5, shard=False, limit=1.0).batches(0))
    assert [found_bytes.get() for _ in range(found_bytes.qsize())] == [rows.nbytes] * 4 + [8 * 4] * 4


def test_a_batch_of_a_nested_tensor_is_compared_by_its_parts() -> None:
    """Two of the same parts have shapes that differ, in a symbol."""

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(samples, layout=torch.jagged)

    rows = [torch.arange(float(length)) for length in (2, 3, 1, 4)]
    data: Any = rows
    plain = DataLoader(data, 4, collate_fn=collate)
    (batch,) = training_loader(plain, World(), seed=5, shard=False, limit=1.0).batches(0)
    assert [part.tolist() for part in batch.unbind()] == [row.tolist() for row in rows]
    assert not is_repeatable(batch, collate(rows[::-1]))
    assert not is_repeatable(batch, torch.zeros(4, 1))


OPENED = torch.multiprocessing.Value("b", 0)  # copies share it, as processes do what the system knows of them


class OpenedOnce(Dataset[int]):
    """Opens, when it is first read, what a process may open only once."""

    def __init__(self) -> None:
        self.file: list[int] | None = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            if OPENED.value:
                raise OSError("already open in this process")
            OPENED.value = 1
            self.file = list(range(16))
        return self.file[index]


def _opened_once(folder: str) -> None:
    logging.basicConfig(filename=f"{folder}/log", force=True)
    plain = DataLoader(OpenedOnce(), 4, num_workers=1, collate_fn=list)
    batches = list(training_loader(plain, World(), seed=5, shard=False, limit=1.0).batches(0))
    assert batches == [[*range(first, first + 4)] for first in range(0, 16, 4)]


def test_what_a_worker_cannot_open_again_is_said_and_read(tmp_path: Path) -> None:
    assert run_ranks(_opened_once, str(tmp_path)) == [0]
    assert (tmp_path / "log").read_text().count("OSError: already open in this process") == 1
