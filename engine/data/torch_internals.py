"""Private parts of `torch.utils.data`; `tests/unit/test_internals.py` tests each."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, default_collate
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

__all__ = [
    "batches_read",
    "end_kept_pass",
    "end_workers",
    "forget_workers",
    "generator_address",
    "has_num_samples",
    "is_loader_pass",
    "make_worker_info",
    "replace_unsent",
    "set_worker_info",
    "stacks_tensors",
    "worker_info",
    "workers_of",
]


def worker_info() -> Any:
    """Return the object that `get_worker_info()` returns here; None in a main process."""
    return torch_worker._worker_info


def set_worker_info(info: Any) -> None:
    """Make `get_worker_info()` return `info`."""
    torch_worker._worker_info = info


def make_worker_info(**fields: Any) -> Any:
    """Return a `WorkerInfo` with the given fields: `id`, `num_workers`, `seed`, `dataset`."""
    return torch_worker.WorkerInfo(**fields)


def replace_unsent(replacement: Callable[[Exception], Any]) -> None:
    """Make the worker send `replacement(error)` for batches it cannot send.

    Called in a `worker_init_fn`.

    Its queue would print the error and drop the batch, and the main process would wait for it for ever.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch_worker._worker_loop.__code__:
        frame = frame.f_back
    if frame is not None:
        queue: Any = frame.f_locals["data_queue"]
        queue._on_queue_feeder_error = lambda error, item: queue.put((item[0], replacement(error)))


def stacks_tensors(collate: Any) -> bool:
    """Return whether `collate`, in a main process, only stacks a list of tensors."""
    known: Any = torch_collate.default_collate_fn_map  # which users may change
    return collate is default_collate and known[Tensor] is torch_collate.collate_tensor_fn


def workers_of(iterator: Any) -> list[Any]:
    """Return the processes of a loader's iterator; [] if it has no workers."""
    return list(getattr(iterator, "_workers", ()))


def end_workers(iterator: Any) -> None:
    """End the workers of a loader's iterator, if it has any."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def is_loader_pass(value: object) -> bool:
    """Return whether `value` is an iterator of a DataLoader, also of torchdata's."""
    return isinstance(value, torch_loader._BaseDataLoaderIter)


def batches_read(iterator: Any) -> int:
    """Return the number of batches that an iterator of a DataLoader has returned."""
    return int(iterator._num_yielded)


def end_kept_pass(loader: DataLoader[Any]) -> None:
    """End persistent workers of `loader`; its next pass starts others."""
    if loader._iterator is not None:
        end_workers(loader._iterator)
        loader._iterator = None


def forget_workers(iterator: Any) -> None:
    """Remove a loader iterator's workers from those watched by torch's signal handler."""
    if getattr(iterator, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def has_num_samples(sampler: RandomSampler) -> bool:
    """Return whether a RandomSampler was given `num_samples`."""
    return sampler._num_samples is not None


def generator_address(generator: Any) -> int:
    """Return the address of the C++ object of `generator`."""
    address: int = generator._cdata
    return address
