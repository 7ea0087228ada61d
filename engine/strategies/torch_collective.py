"""Ranks that meet in a process group of torch's: over NCCL on GPUs, over gloo elsewhere."""

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
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.object_gather import gather_objects
from midstride.engine.strategies.rendezvous import rendezvous_store
from midstride.engine.strategies.side_channel import CHANNEL, SideChannel
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

#: what gloo and NCCL say where another rank does not answer, or left
_LOST = re.compile("tim(ed|e) ?out|closed by peer|reset by peer|broken pipe|pair closure", re.IGNORECASE)
#: a rank may still be importing, or reading its first batch, while the others wait
TIMEOUT = timedelta(minutes=30)


class TorchCollective(Collective):
    """The default process group of `torch.distributed`."""

    def __init__(self) -> None:
        self._stores = 0

    def init_process_group(self, world: World, device: torch.device) -> None:
        """Meet the other ranks over NCCL on GPUs and gloo elsewhere."""
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        rank, size = world.rank, world.size
        try:
            dist.init_process_group(backend, store=rendezvous_store(world), rank=rank, world_size=size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise WorldError(f"rank {rank} of {size} could not meet the others over {backend}: {error}") from error
        atexit.register(leave_process_group)

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Bound the collectives of every group but those beside training, which wait for stores."""
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
        """Return whether `error` is gloo's or NCCL's of a timeout or a closed connection."""
        return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        return gather_objects(value, dist.get_world_size())

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on every rank, at the price of one number exchanged on the host."""
        lowest = torch.tensor(int(value))
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return bool(lowest)

    def key_value_store(self) -> Any:
        """Return a new corner of torch's store; every rank calls this equally often."""
        self._stores += 1
        return PrefixStore(f"midstride/{self._stores}", default_store())

    def side_channel(self) -> SideChannel:
        """Return a process group of its own; every rank calls this at the same point."""
        return SideChannel(dist.get_world_size())


def leave_process_group() -> None:
    """Destroy the default process group, if there is one; after an error others may be gone, and it is left alone."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def leave_process_group_of_one() -> None:
    """Destroy the default process group if no other process is in it: a fork would have it, and none of its threads."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def broadcast(module: nn.Module, source: int = 0, group: Any = None) -> None:
    """Start every rank of `group` from the weights and buffers of rank `source`, as DDP does."""
    broadcast_tensors([*module.parameters(), *module.buffers()], source, group)


def broadcast_tensors(tensors: Iterable[Tensor], source: int = 0, group: Any = None) -> None:
    """Overwrite `tensors` by those of rank `source`; every rank of `group` has them in the same order."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)


def start_sum() -> Callable[[Tensor, str], Any]:
    """Return what begins to add a tensor up over all ranks, whatever else they exchange meanwhile."""
    group = dist.new_group()
    return lambda tensor, name: dist.all_reduce(tensor, group=group, async_op=True)


def anywhere(has: Sequence[bool], device: torch.device, group: Any = None) -> list[bool]:
    """Return of each flag whether it is set on any rank of `group`; ranks train on `device`."""
    host = torch.device("cpu") if device.type == "cuda" else device  # over gloo: no wait for what the GPU still does
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
    """Average the gradients of `parameters` over the `size` ranks of `group`, in one flat buffer.

    Args:
        parameters: the same on every rank, in the same order.
        device: where the ranks tell each other which of them have gradients.
        size: ranks.
        group: theirs, if not all.
        add_up: adds a buffer up over the ranks, in place, where that is not the group's affair.
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
