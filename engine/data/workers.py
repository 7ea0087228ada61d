"""Starts a loader's workers, ends them with their rank, and reports lost ones."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data import DataLoader

from midstride.engine.data.seeded_dataset import WorkerFailure
from midstride.engine.data.torch_internals import (
    end_workers,
    forget_workers,
    make_worker_info,
    replace_unsent,
    set_worker_info,
    worker_info,
    workers_of,
)
from midstride.engine.errors import EngineError, UserError, WorldError
from midstride.engine.processes.lifetime import die_with_parent, exit_with

__all__ = [
    "RankBoundWorker",
    "end_all_workers",
    "next_batch",
    "rebuild_loader",
    "start_workers",
]

#: by exit code: what may have been missing
_HINTS = {
    -signal.SIGKILL: " (SIGKILL: out of memory?)",
    -signal.SIGBUS: " (SIGBUS: /dev/shm full?)",
    -signal.SIGSEGV: " (SIGSEGV: a library crashed; with num_workers=0 the error names your line)",
}
#: seconds that a worker whose connection was cut gets to end
_ENDS_S = 5.0
#: whether a loader forks its workers now
_starts_workers = False
#: loader -> its iterators that are still referenced
_ITERATORS: WeakKeyDictionary[DataLoader[Any], WeakSet[Any]] = WeakKeyDictionary()


class RankBoundWorker:
    """A `worker_init_fn` that calls the user's, and makes the worker end if its rank is killed."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init
        self.rank_pid = os.getpid()

    def set_init(self, init: Callable[[int], None] | None) -> None:
        """Set the user's `worker_init_fn` for the next workers."""
        self.init = init

    def __call__(self, worker: int) -> None:
        """Run in a new worker, before it reads."""
        if os.getppid() == self.rank_pid:
            die_with_parent(self.rank_pid)
        else:  # its parent is a fork server, not the rank
            exit_with(self.rank_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the rank ends its workers
        replace_unsent(lambda error: WorkerFailure.of(f"worker {worker}, sending a batch", error))
        if self.init is None:
            return
        info = worker_info()
        fields = {"id": info.id, "num_workers": info.num_workers, "seed": info.seed}
        set_worker_info(make_worker_info(**fields, dataset=getattr(info.dataset, "dataset", info.dataset)))
        try:
            self.init(worker)
        except Exception as error:
            info.dataset.set_failure(WorkerFailure.of(f"worker_init_fn of worker {worker}", error))


def rebuild_loader(
    loader: DataLoader[Any], dataset: Any, *, key: int, init: Callable[[int], None] | None, **arguments: Any
) -> DataLoader[Any]:
    """Return a DataLoader of `dataset` with the worker settings of `loader`.

    Args:
        loader: the user's loader.
        dataset: the data set to read.
        key: seed of its generator, from which `iter()` draws a seed instead of from the main one.
        init: `worker_init_fn` to call in workers, or None.
        arguments: further arguments of DataLoader.
    """
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=RankBoundWorker(init),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(key),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **arguments,
    )


def start_workers(loader: DataLoader[Any], name: str) -> Iterator[Any]:
    """Return `iter(loader)`, with workers started.

    Raises:
        UserError: the workers could not be started.
    """
    try:
        with _garbage_left():
            iterator = iter(loader)
    except EngineError:
        raise
    except Exception as error:
        raise UserError(
            f"the workers of {name} could not be started: {type(error).__name__}: {error}. Without fork they are "
            f"pickled: define the data set and collate_fn at module level, without open files."
        ) from error
    # `next_batch` detects lost workers. torch would raise from a signal handler at any point of the main process, such
    # as in the user's training step or in a snapshot, also for workers that were ended on purpose.
    forget_workers(iterator)
    _ITERATORS.setdefault(loader, WeakSet()).add(iterator)
    return iterator


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Leave the garbage of this process to it: forks in the block collect none of it.

    A destructor can wait for threads, as that of a process group does. A fork has none of them, and would hang.
    """
    global _starts_workers
    _starts_workers = True
    try:
        yield
    finally:
        _starts_workers = False


def _freeze_in_worker() -> None:
    if _starts_workers:
        gc.freeze()


os.register_at_fork(after_in_child=_freeze_in_worker)


def end_all_workers(loader: DataLoader[Any]) -> None:
    """End all workers of `loader`: persistent ones, and those of a pass that an error ended.

    The traceback of an error refers to the pass, and notebooks keep the error.
    """
    for iterator in _ITERATORS.pop(loader, ()):
        end_workers(iterator)


def next_batch(iterator: Iterator[Any], where: Callable[..., str], *position: Any) -> Any:
    """Return the next batch of `iterator`.

    Args:
        iterator: iterator over a loader.
        where: function from `position` to the end of an error's message.
        position: position of the batch.

    Raises:
        WorldError: a worker was lost.
        EngineError: the error of a `WorkerFailure`.
    """
    try:
        batch = next(iterator)
    except (RuntimeError, OSError, EOFError) as error:
        # A batch in shared memory is opened by way of its worker, which may be on its way out.
        found = _lost_workers(iterator, 0.0 if isinstance(error, RuntimeError) else _ENDS_S)
        if not found and not isinstance(error, RuntimeError):
            raise
        # Ended now, since the traceback of the error refers to them.
        lost = ", ".join(found) or str(error)
        end_workers(iterator)
        raise WorldError(f"{lost}{where(*position)}. No sample is lost: a retry reads them again.") from error
    if isinstance(batch, WorkerFailure):
        end_workers(iterator)
        raise batch.error(where(*position))
    return batch


def _lost_workers(iterator: Any, wait_s: float) -> list[str]:
    """Return text on each worker that ends within `wait_s`, with signal or exit code."""
    lost, processes = [], workers_of(iterator)
    ending = wait([process.sentinel for process in processes], wait_s)
    for number, process in enumerate(processes):
        process.join(None if process.sentinel in ending else 0)
        code = process.exitcode
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            lost.append(f"worker {number} (process {process.pid}) ended by {how}{_HINTS.get(code, '')}")
    return lost
