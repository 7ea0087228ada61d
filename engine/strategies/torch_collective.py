"""Collective over torch's process groups (NCCL on GPUs, else gloo), and their functions."""

import atexit
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from midstride.engine.errors import WorldError
from midstride.engine.strategies.collective import CHANNEL, TIMEOUT, Collective, SideChannel, gather_objects
from midstride.engine.strategies.rendezvous import rendezvous_store, shared_values
from midstride.engine.strategies.torch_internals import PrefixStore, default_store, groups, set_timeout
from midstride.engine.world import World

__all__ = [
    "TorchCollective",
    "anywhere",
    "average_gradients",
    "broadcast",
    "broadcast_tensors",
    "leave_process_group",
    "leave_process_group_of_one",
    "start_sum",
]

#: in messages of gloo and NCCL if another rank does not answer, or has ended
_LOST = re.compile("tim(ed|e) ?out|closed by peer|reset by peer|broken pipe|pair closure", re.IGNORECASE)


class TorchCollective(Collective):
    """The default process group of `torch.distributed`."""

    def init_process_group(self, world: World, device: torch.device) -> None:
        """Connect to the other ranks over NCCL on GPUs and gloo elsewhere."""
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        rank, size = world.rank, world.size
        try:
            dist.init_process_group(backend, store=rendezvous_store(world), rank=rank, world_size=size, timeout=TIMEOUT)
        except (RuntimeError, ValueError, OSError) as error:
            raise WorldError(f"rank {rank} of {size} could not meet the others over {backend}: {error}") from error
        atexit.register(leave_process_group)

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Set the timeout of every group except side channels, which can wait for writes to a store."""
        bounded = [group for group in groups() if group.group_desc != CHANNEL]
        for group in bounded:
            set_timeout(group, timedelta(seconds=timeout_s))
        try:
            yield
        finally:
            for group in bounded:
                if group in groups():
                    set_timeout(group, TIMEOUT)

    def is_peer_failure(self, error: Exception) -> bool:
        """Return whether `error` is an error of gloo or NCCL on a timeout or a closed connection."""
        return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        return gather_objects(value, dist.get_world_size())

    def all_agree(self, value: bool) -> bool:
        """Return True if `value` is true on all ranks, by one number exchanged on the host."""
        lowest = torch.tensor(int(value))
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return bool(lowest)

    def key_value_store(self) -> Any:
        """Return an empty store of the ranks; every rank calls this equally often."""
        rank, store = dist.get_rank(), default_store()
        # The count is in the group's store, which all fits of a process share: an earlier fit's prefix has values.
        number = store.add(f"midstride/stores/{rank}", 1)
        return shared_values(PrefixStore(f"midstride/{number}", store), rank, dist.get_world_size())

    def side_channel(self) -> SideChannel:
        """Return a channel with its own process group. Call it on all ranks at the same point."""
        return SideChannel(dist.get_world_size())


def leave_process_group() -> None:
    """Destroy the default process group, if any.

    Do not call it after an error, when other ranks can have ended.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def leave_process_group_of_one() -> None:
    """Destroy a process group of one: a fork would inherit it without its threads."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def broadcast(module: nn.Module, source: int = 0, group: Any = None) -> None:
    """Copy the weights and buffers of rank `source` to every rank of `group`, as DDP does."""
    broadcast_tensors([*module.parameters(), *module.buffers()], source, group)


def broadcast_tensors(tensors: Iterable[Tensor], source: int = 0, group: Any = None) -> None:
    """Copy the values of `tensors` from rank `source` to all ranks of `group`, in one order."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)


def start_sum() -> Callable[[Tensor, str], Any]:
    """Return a function that starts an asynchronous sum over all ranks in its own group."""
    group = dist.new_group()
    return lambda tensor, name: dist.all_reduce(tensor, group=group, async_op=True)


def anywhere(has: Sequence[bool], device: torch.device, group: Any = None) -> list[bool]:
    """Return for each flag in `has` if any rank of `group`, on `device`, has True."""
    host = torch.device("cpu") if device.type == "cuda" else device  # over gloo, which does not wait for the GPU
    flags = torch.tensor(has, dtype=torch.uint8, device=host)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return list(map(bool, flags.tolist()))


def average_gradients(
    parameters: Iterable[Tensor],
    device: torch.device,
    size: int,
    group: Any = None,
    add_up: Callable[[Tensor], None] | None = None,
) -> None:
    """Average gradients of `parameters` over the `size` ranks of `group` in one flat buffer.

    Args:
        parameters: the same on every rank, in the same order.
        device: of the flags by which ranks exchange which gradients they have.
        size: number of ranks.
        group: process group of these ranks; None for all ranks.
        add_up: sums a buffer over the ranks in place; by default an all-reduce in `group`.
    """
    every = [p for p in parameters if p.requires_grad]
    has = anywhere([p.grad is not None for p in every], device, group)
    used = [p for p, has_one in zip(every, has, strict=True) if has_one]
    if not used:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
    flat = torch.cat([g.reshape(-1) for g in grads])
    if add_up is None:
        dist.all_reduce(flat, group=group)
    else:
        add_up(flat)
    flat /= size
    for parameter, mean in zip(used, flat.split([p.numel() for p in used]), strict=True):
        parameter.grad = mean.view_as(parameter).clone()
