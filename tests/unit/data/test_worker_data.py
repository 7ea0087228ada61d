"""What is set on loaders and data in training reaches the next epoch; a pass that goes on has what it began with."""

import gc
import logging
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from midstride.engine.data.dataloader_order import training_loader
from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import NotExact
from midstride.engine.world import World


class Ones(Dataset[Tensor]):
    def __init__(self) -> None:
        self.scale = 1.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((), self.scale)


class Streamed(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.scale = 1.0

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.full((8,), self.scale))


def negated(rows: list[Tensor]) -> Tensor:
    return -torch.stack(rows)


def resumable(loader: DataLoader[Any]) -> ResumableLoader:
    if isinstance(loader.dataset, IterableDataset):
        return IterableLoader(loader, name="the training loader", key=1, limit=1.0)
    return training_loader(loader, World(rank=0, size=1), seed=5, shard=False, limit=1.0)


def sums(loader: ResumableLoader, epoch: int, start: int = 0) -> list[float]:
    return [float(batch.sum()) for batch in loader.batches(epoch, start)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [Ones, Streamed])
def test_a_new_collate_fn_makes_the_batches_of_the_next_epoch(data: Any, workers: int) -> None:
    loader: DataLoader[Any] = DataLoader(data(), 4, num_workers=workers)
    read = resumable(loader)

    batches = read.batches(0)
    first = float(next(batches).sum())
    loader.collate_fn = negated

    assert [first, *(float(batch.sum()) for batch in batches)] == [4.0, 4.0]
    assert sums(read, 1) == [-4.0, -4.0]


def tripled(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.scale = 3.0


@pytest.mark.parametrize("data", [Ones, Streamed])
def test_a_worker_init_fn_that_is_set_anew_begins_the_next_epoch(data: Any) -> None:
    loader: DataLoader[Any] = DataLoader(data(), 4, num_workers=1)
    read = resumable(loader)

    batches = read.batches(0)
    first = float(next(batches).sum())
    loader.worker_init_fn = tripled

    assert [first, *(float(batch.sum()) for batch in batches)] == [4.0, 4.0]
    assert sums(read, 1) == [12.0, 12.0]


@pytest.mark.parametrize(
    ("kind", "workers", "later_workers", "rest"),
    [
        (Ones, 1, 1, [4.0]),
        (Ones, 1, 0, [8.0]),  # without workers data are what they are
        (Streamed, 0, 1, [4.0]),
        (Streamed, 1, 0, [4.0]),
    ],
)
def test_a_pass_keeps_its_initial_data_at_any_number_of_workers(
    kind: Any, workers: int, later_workers: int, rest: list[float]
) -> None:
    data, resumed = kind(), kind()
    read = resumable(DataLoader(data, 4, num_workers=workers))
    batches = read.batches(0)
    next(batches)
    assert "start" not in read.state_dict()
    data.scale = 2.0
    state = read.state_dict()
    assert [float(batch.sum()) for batch in batches] == [4.0]

    resumed.scale, resumed.later = 2.0, 1  # set in training, too
    again = resumable(DataLoader(resumed, 4, num_workers=later_workers))
    again.load_state_dict(state)

    assert sums(again, 0, 1) == rest
    assert vars(resumed) == {"scale": 2.0, "later": 1}
    assert sums(again, 1) == [8.0, 8.0]


def test_a_stream_that_cannot_be_copied_has_no_initial_state() -> None:
    data: Any = Streamed()
    data.lock = threading.Lock()
    read = resumable(DataLoader(data, 4))
    batches = read.batches(0)
    next(batches)
    assert read.changed_in_pass() is None

    data.scale = 2.0

    assert "start" not in read.state_dict()
    changed = "the training loader over Streamed: Streamed.scale has changed since the epoch began"
    assert (read.changed_in_pass() or "").startswith(changed)


class CountingCalls:
    def __init__(self) -> None:
        self.calls, self.draw = 0, random.Random(3)

    def __call__(self, rows: list[Tensor]) -> Tensor:
        self.calls += 1
        return torch.stack(rows) * self.calls + self.draw.random()


def test_a_collate_fn_that_changes_during_a_stream_is_named() -> None:
    collate = CountingCalls()
    read = resumable(DataLoader(Streamed(), 4, collate_fn=collate))
    drawn = collate.draw.getstate()

    next(read.batches(0))

    assert collate.draw.getstate() == drawn
    changed = "the training loader over Streamed: loader.collate_fn.calls has changed since the epoch began"
    assert (read.changed_in_pass() or "").startswith(changed)


class OfFile(IterableDataset[Tensor]):
    def __init__(self, file: Any) -> None:
        self.file = file

    def __iter__(self) -> Iterator[Tensor]:
        for line in self.file:
            yield torch.tensor(float(line))


def test_a_stream_of_the_lines_of_an_open_file_moves_on_in_it(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("1\n" * 20)
    with (tmp_path / "numbers.txt").open() as file:
        read = resumable(DataLoader(OfFile(file), 4))
        batches = read.batches(0)
        assert float(next(batches).sum()) == 4.0
        assert "OfFile.file has changed since the epoch began" in (read.changed_in_pass() or "")


@pytest.mark.parametrize("data", [Ones, Streamed])
def test_persistent_workers_keep_their_initial_data(data: Any) -> None:
    first, second = data(), data()
    read = resumable(DataLoader(first, 4, num_workers=1, persistent_workers=True))
    assert sums(read, 0) == [4.0, 4.0]
    state = read.state_dict()
    first.scale = 2.0  # after the snapshot of the epoch's end, and in the life that goes on from there again
    assert sums(read, 1) == [4.0, 4.0]

    again = resumable(DataLoader(second, 4, num_workers=1, persistent_workers=True))
    again.load_state_dict(state)
    again.restored()
    second.scale = 2.0

    assert sums(again, 1) == [4.0, 4.0]


def test_workers_that_had_not_begun_begin_with_what_data_hold() -> None:
    data = Ones()
    again = resumable(DataLoader(data, 4, num_workers=1, persistent_workers=True))
    again.load_state_dict(resumable(DataLoader(Ones(), 4)).state_dict())
    again.restored()

    data.scale = 2.0

    assert sums(again, 0) == [8.0, 8.0]


def chosen() -> Any:
    return Subset(Subset(TensorDataset(torch.arange(8.0)), range(8)), [*range(8)])


@pytest.mark.parametrize(
    ("data", "workers"), [(Ones, 0), (Streamed, 0), (Ones, 1), (chosen, 1), (lambda: [(1.0, [2])] * 8, 1)]
)
def test_a_state_of_unchanged_data_walks_no_objects(data: Any, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of one's own may take one at every step."""
    loader: DataLoader[Any] = DataLoader(data(), 4, num_workers=workers)
    read = resumable(loader)
    batches = read.batches(0)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr("midstride.engine.data.worker_data.GraphWalk", None)
        assert "start" not in read.state_dict()
    loader.collate_fn = negated
    assert "start" in read.state_dict()


class OfWorker(Ones):
    """Samples say which worker read them."""

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        return torch.full((), -1.0 if info is None else float(info.id))


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_resumed_pass_gives_each_batch_to_its_worker(start: int) -> None:
    assert sums(resumable(DataLoader(OfWorker(), 2, num_workers=2)), 0, start) == [0.0, 2.0, 0.0, 2.0][start:]


class Counting(Ones):
    """Counts what is read of it; samples say how often, from some reading on."""

    def __init__(self, after: int = 1000) -> None:
        super().__init__()
        self.reads, self.after = 0, after

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.full((), float(self.reads if self.reads > self.after else 0))


def test_what_is_read_twice_in_the_main_process_is_counted_once() -> None:
    data = Counting()
    list(resumable(DataLoader(data, 4)).batches(0))
    assert data.reads == 256


def test_data_that_depend_on_their_reads_in_a_worker_are_refused() -> None:
    read = resumable(DataLoader(Counting(after=150), 4, num_workers=1))
    with pytest.raises(NotExact, match=r"Counting returned another batch than .* \(data set/reads \(0, now 192\)\)"):
        list(read.batches(0))


class CountsInGlobal(Ones):
    def __getitem__(self, index: int) -> Tensor:
        READS["all"] += 1
        return super().__getitem__(index)


READS = {"all": 0}
NAMED = {Counting: r"data set/reads \(8, now 16\)", CountsInGlobal: r"global \S+\.READS\['all'\] \('0', now '\d'\)"}


@pytest.mark.parametrize("data", NAMED)
def test_data_that_count_reads_in_workers_are_named_once(data: Any, tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log")  # workers are forked with it
    logging.getLogger("midstride").addHandler(handler)
    try:
        list(resumable(DataLoader(data(), 4, num_workers=2)).batches(0))
    finally:
        logging.getLogger("midstride").removeHandler(handler)
        handler.close()
    found = re.findall(rf"what \w+ or its code holds, .*: {NAMED[data]}", (tmp_path / "log").read_text())
    assert len(found) == 1


class Cycle:
    """Garbage that tells which process has collected it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


class Collecting(Ones):
    def __getitem__(self, index: int) -> Tensor:
        gc.collect()
        return super().__getitem__(index)


def test_a_worker_does_not_collect_the_garbage_of_its_rank(tmp_path: Path) -> None:
    """The destructor of a process group waits for threads, which a fork does not have."""
    gc.disable()
    try:
        Cycle(tmp_path)
        assert sums(resumable(DataLoader(Collecting(), 4, num_workers=1)), 0) == [4.0, 4.0]
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
