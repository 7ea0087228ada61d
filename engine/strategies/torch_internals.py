"""Private names of torch in strategies, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.nn.modules.batchnorm import _NormBase

__all__ = [
    "NORMALISATION",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "default_store",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul",
    "foreach_norm",
    "groups",
    "initialize_xla",
    "is_in_bad_fork",
    "replica_of",
    "schedule_of",
    "set_timeout",
    "version_of",
]

#: batch and instance norm have a base class without a public name
NORMALISATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
#: one operation on each of a list of tensors, in few kernels
foreach_add_, foreach_copy_ = torch._foreach_add_, torch._foreach_copy_
foreach_mul, foreach_norm = torch._foreach_mul, torch._foreach_norm


def groups() -> list[Any]:
    """Return all process groups; each has a `group_desc`."""
    return list(dist.distributed_c10d._world.pg_map)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of all further collectives of `group`."""
    public = getattr(dist, "set_timeout", None)  # torch's from 2.14 on, which warns of the other
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group)


def default_store() -> Store:
    """Return the key-value store in which the ranks of the default group met."""
    return dist.distributed_c10d._get_default_store()


def replica_of(module: nn.Module) -> Any:
    """Return a shallow copy of `module` with its own dicts of parameters, buffers and children."""
    return module._replicate_for_data_parallel()


def version_of(tensor: Tensor) -> int:
    """Return how often `tensor` was changed in place."""
    return tensor._version


def is_in_bad_fork() -> bool:
    """Return True in a fork of a process that has asked for CUDA: the fork cannot use it."""
    return bool(torch.cuda._is_in_bad_fork())


def initialize_xla(local_rank: int, local_size: int) -> None:
    """Tell torch_xla of this machine's processes before any device is used.

    `init_method="xla://"` does the same.
    """
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(local_rank, local_size)


def schedule_of(kind: Any, stage: Any, count: int, **options: Any) -> Any:
    """Return torch's schedule for `count` micro-batches, also fewer than stages in torch 2.10.

    The constructor of 2.10 refuses fewer, but a later change of the number works.
    """
    if count >= stage.num_stages:
        return kind(stage, count, **options)
    schedule = kind(stage, stage.num_stages, **options)
    schedule._n_microbatches = count
    return schedule
