"""Private names of torch in strategies, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.nn.modules.batchnorm import _NormBase

__all__ = [
    "NORMALISATION",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "check_new_groups",
    "default_store",
    "file_of",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul",
    "foreach_norm",
    "groups",
    "has_unreduced_gradients",
    "initialize_xla",
    "is_in_bad_fork",
    "meet_in",
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
    return list(distributed_c10d._world.pg_map)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of all further collectives of `group`."""
    public = getattr(dist, "set_timeout", None)  # torch's from 2.14 on, which warns of the other
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def default_store() -> Store:
    """Return the key-value store in which the ranks of the default group met."""
    return distributed_c10d._get_default_store()


def file_of(store: Store) -> str:
    """Return the path of the file behind `store`; "" if there is none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    path: str = getattr(store, "path", "")
    return path if isinstance(store, FileStore) else ""


def meet_in(private: Callable[[], Store | None]) -> None:
    """Make `init_process_group()` without a store meet in that of `private`, if any."""
    as_told: Any = _rendezvous_handlers["env"]

    def meet(url: str, *arguments: Any, **options: Any) -> Any:
        store = private()
        if store is None:
            yield from as_told(url, *arguments, **options)
            return
        told = {
            "rank": os.environ["RANK"],
            "world_size": os.environ["WORLD_SIZE"],
            **dict(parse_qsl(urlparse(url).query)),
        }
        yield store, int(told["rank"]), int(told["world_size"])

    _rendezvous_handlers["env"] = meet


def check_new_groups(check: Callable[[Any, Store], None]) -> None:
    """Call `check` with each new process group and its store, on each member.

    Only groups that use gloo for tensors on the host.
    """
    new: Any = distributed_c10d._new_process_group_helper
    host = torch.device("cpu")

    @wraps(new)
    def new_and_checked(*arguments: Any, **options: Any) -> Any:
        group, store = new(*arguments, **options)
        is_member = isinstance(group, dist.ProcessGroup)
        if is_member and host in group._device_types and group._get_backend(host).name() == "gloo":
            check(group, store)
        return group, store

    distributed_c10d._new_process_group_helper = new_and_checked


def has_unreduced_gradients(sharded: Any) -> bool:
    """Return whether a sharded module has gradients that a later backward pass exchanges."""
    state = sharded._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.10 has one at most
    cut = [one for group in groups if group is not None for one in group.fsdp_params]
    whole = [getattr(one, "_unsharded_param", None) for one in cut]  # none before the first pass
    is_summed = any(one.unsharded_accumulated_grad is not None for one in cut)
    return is_summed or any(one is not None and one.grad is not None for one in whole)


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
