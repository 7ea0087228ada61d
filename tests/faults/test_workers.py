"""What goes wrong in workers: told with loader, rank, worker and batch, to be retried or not, and no sample is lost."""

import ctypes
import errno
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.data.dataloader_order import training_loader
from midstride.engine.data.worker_memory import share
from midstride.engine.errors import EngineError, UserCodeError, UserError, WorldError
from midstride.engine.testing import run_ranks
from midstride.engine.world import World

PR_GET_PDEATHSIG = 2


class Rows(Dataset[int]):
    """Twenty numbers; something happens once, where one of them is read."""

    def __init__(self, mark: Path, act: Callable[[], object], index: int = 9) -> None:
        self.mark, self.act, self.index = mark, act, index

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == self.index and not self.mark.exists():
            self.mark.touch()
            self.act()
        return index


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def without_memory() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def crashed() -> None:
    ctypes.string_at(0)


def raised() -> None:
    raise KeyError("colour")


def asleep() -> None:
    threading.Event().wait()


def raised_at_start(worker: int) -> None:
    if worker == 1:
        raise OSError("no such table")


def raised_in_collate(samples: list[int]) -> list[int]:
    if 9 in samples:
        raise ValueError("shapes differ")
    return samples


def shares_too_much(samples: list[int]) -> list[int]:
    if 9 in samples:
        torch.UntypedStorage._new_shared(1 << 50)
    return samples


def locked(samples: list[int]) -> Any:
    return [threading.Lock()] if 9 in samples else samples


class Large:
    """Goes into shared memory as it is sent, for which there is no room."""

    def __reduce__(self) -> Any:
        return torch.UntypedStorage._new_shared(1 << 50)


def large(samples: list[int]) -> Any:
    return Large() if 9 in samples else samples


#: name -> the act, options of the loader, the error, what it says
FAULTS: dict[str, tuple[Callable[[], object], dict[str, Any], type[EngineError], list[str]]] = {
    # It may die before the queue has sent what it read earlier: which batch is waited for then is chance.
    "killed": (killed, {}, WorldError, ["worker 0", "signal 9", "out of memory", "of epoch 0", "rank 1"]),
    "finds no memory": (without_memory, {}, WorldError, ["worker 0", "signal 7", "/dev/shm full"]),
    "crashes": (crashed, {}, WorldError, ["worker 0", "signal 11 (SIGSEGV: a library crashed", "rank 1"]),
    "raises": (raised, {}, UserCodeError, ["KeyError: 'colour'", "in raised", "[9, 11], in worker 0", "batch 2"]),
    # Workers that start on a busy machine take their time.
    "does not answer": (
        asleep,
        {"timeout": 10},
        WorldError,
        ["timed out after 10 seconds", "batch 2 of epoch 0", "[9, 11]"],
    ),
    "raises at its start": (
        list,
        {"worker_init_fn": raised_at_start},
        UserCodeError,
        ["OSError: no such table", "worker_init_fn of worker 1", "batch 1 of epoch 0"],
    ),
    "cannot collate": (
        list,
        {"collate_fn": raised_in_collate},
        UserCodeError,
        [
            "ValueError: shapes differ",
            "raised_in_collate, collating samples [9, 11], in worker 0",
            "batch 2 of epoch 0",
        ],
    ),
    "has no shared memory": (
        list,
        {"collate_fn": shares_too_much},
        WorldError,
        ["/dev/shm, is full: unable to", "--shm-size", "num_workers=0", "[9, 11], in worker 0", "batch 2 of epoch 0"],
    ),
    "has no shared memory to send": (
        list,
        {"collate_fn": large},
        WorldError,
        ["/dev/shm, is full: unable to", "num_workers=0", "worker 0, sending a batch", "batch 2 of epoch 0", "[9, 11]"],
    ),
    "cannot send": (
        list,
        {"collate_fn": locked},
        UserCodeError,
        [
            "TypeError: cannot pickle '_thread.lock' object",
            "worker 0, sending a batch",
            "batch 2 of epoch 0",
            "[9, 11]",
        ],
    ),
    "cannot be started": (
        list,
        {"multiprocessing_context": "spawn", "collate_fn": lambda samples: samples},
        UserError,
        ["the workers of the train loader could not be started", "pickle", "module level"],
    ),
}


def _meets(name: str, mark: str) -> None:
    act, options, kind, words = FAULTS[name]

    def feed(**given: Any) -> Any:
        # Rank 1 of 2 reads every other number; batch 2 of two is [9, 11].
        loader = DataLoader(Rows(Path(mark), act), 2, num_workers=2, **{"collate_fn": list, **given})
        return training_loader(loader, World(rank=1, size=2), seed=1, shard=True, limit=1.0)

    found: list[Any] = []
    with pytest.raises(kind) as caught:
        found.extend(feed(**options).batches(0))  # what came before the error stays
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert caught.value.exit_code == (1 if kind is WorldError else 2)
    assert "DataLoader worker process" not in str(caught.value)
    assert found + list(feed().batches(0, len(found))) == [[n, n + 2] for n in range(1, 20, 4)]


@pytest.mark.parametrize("name", FAULTS)
def test_says_where_and_the_next_life_goes_on_there(name: str, tmp_path: Path) -> None:
    # In a process of its own, as a rank is: other tests leave threads here, over which no worker should be forked.
    assert run_ranks(_meets, name, str(tmp_path / "mark")) == [0]


def test_workers_without_shared_memory_are_reported() -> None:
    too_large: Any = SimpleNamespace(share_memory_=lambda: torch.UntypedStorage._new_shared(1 << 50))
    with pytest.raises(WorldError, match=r"/dev/shm, is full: unable to .* num_workers=0"):
        share(too_large)


def _begun() -> tuple[Iterator[Any], Any]:
    """Return the batches of a loader of one worker, of which one was read, and torch's iterator behind them."""
    loader = DataLoader(range(20), 2, num_workers=1, collate_fn=list)
    feed = training_loader(loader, World(), seed=1, shard=False, limit=1.0)
    batches: Any = feed.batches(0)
    next(batches)
    return batches, batches.gi_frame.f_locals["iterator"]


def _loses_a_worker_elsewhere() -> None:
    """A worker dies while the main process is in the user's code: nothing may be raised there."""
    batches, iterator = _begun()
    iterator._timeout = 2  # only now: a worker that starts may take longer
    (worker,) = iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert sum(range(100_000)) > 0  # signal handlers run between the steps of this
    with pytest.raises(WorldError, match="signal 9"):
        list(batches)


def test_a_worker_death_is_reported_at_the_next_read() -> None:
    assert run_ranks(_loses_a_worker_elsewhere) == [0]


def _loses_a_worker_as_it_opens_its_batch() -> None:
    """What a batch in shared memory is opened by is cut while the worker ends: torch takes it for alive."""
    batches, iterator = _begun()

    def reset(*_: object) -> None:
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    iterator._get_data = reset
    with pytest.raises(WorldError, match="signal 9"):
        list(batches)


def test_a_worker_death_during_a_transfer_is_reported() -> None:
    assert run_ranks(_loses_a_worker_as_it_opens_its_batch) == [0]


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Broken(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[int], batch_idx: int) -> torch.Tensor:
        assert multiprocessing.active_children()
        raise KeyError("colour")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _raises_in_a_step() -> None:
    """Here the error, which holds the pass by its traceback, is held as a notebook holds it."""
    for data in (range(20), Counted()):
        for stay in (False, True):
            loader: Any = DataLoader(data, 2, num_workers=1, collate_fn=list, persistent_workers=stay)
            with pytest.raises(UserCodeError) as caught:
                Trainer(max_epochs=1, seed=1).fit(Broken(), loader)
            assert not multiprocessing.active_children(), (data, stay, caught)


def test_no_worker_is_left_while_the_error_of_a_fit_is_held() -> None:
    assert run_ranks(_raises_in_a_step) == [0]


class Deaths(Dataset[int]):
    """Gives the signal that the process which reads it gets when its parent dies."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        number = ctypes.c_int()
        assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) == 0
        return number.value


def _reads_deaths() -> None:
    feed = training_loader(
        DataLoader(Deaths(), num_workers=1, collate_fn=list), World(), seed=1, shard=False, limit=1.0
    )
    assert list(feed.batches(0)) == [[signal.SIGKILL]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tie between processes is Linux's")
def test_a_worker_dies_with_its_rank() -> None:
    assert run_ranks(_reads_deaths) == [0]
