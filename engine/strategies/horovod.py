"""Horovod: a replica per process; gradients averaged in fixed buckets during backward."""

import atexit
import logging
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import horovod.torch as hvd
import torch
import xxhash
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.errors import UserError, WorldError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.optim.schedulers import scale_learning_rates
from midstride.engine.strategies.collective import Collective, SideChannel
from midstride.engine.strategies.gradient_buckets import GradientBuckets
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import AveragesInBuckets, ReplicatesParameters
from midstride.engine.strategies.peers import check_gathered
from midstride.engine.strategies.rendezvous import local_store, shared_values
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.strategies.torch_internals import PrefixStore, Store, TCPStore
from midstride.engine.world import World

__all__ = ["Horovod"]

log = logging.getLogger(__name__)

#: the threads of this process, including those that were not started by Python
_THREADS = Path("/proc/self/task")
#: seconds between two polls of an exchange; Horovod's own interval
_POLL_S = 0.001


class Horovod(ReplicatesParameters, AveragesInBuckets):
    """Replicate the module on every rank and let Horovod average the gradients.

    `hvd.DistributedOptimizer` fuses gradients in the order in which they become ready, and the offset of an
    element in the fused buffer decides the order in which it is summed: with three or more ranks, two runs of
    one script differ in their last bits. So an ordinary optimizer is used here, with buffers of a fixed layout:
    gradients in the order of `parameters()`, followed by a flag (1 or 0) per parameter that tells whether this
    rank has its gradient. A parameter without a gradient on any rank keeps None; one with a gradient on another
    rank counts as zero here.

    Args:
        scale_lr: multiply every learning rate, of schedulers too, by the number of processes at the first
            start. It is part of a run's state: later attempts keep the first one's.
    """

    name = "horovod"
    collective: "HorovodCollective"

    def __init__(self, *, scale_lr: bool = True) -> None:
        super().__init__(HorovodCollective())
        self._buckets = GradientBuckets(self.collective.start_mean)
        self._scale_lr = scale_lr
        self._factor = 1

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on parameters whose gradients Horovod cannot sum: sparse or complex ones."""
        sparse = [
            f"the module's {name} has sparse gradients, which strategy horovod cannot average in a fixed order: "
            "build it with sparse=False, or use strategy single"
            for name in sparse_layers(module)
        ]
        return (
            super().module_errors(module)
            + sparse
            + [
                f"the module's {name} is complex, and Horovod has no complex numbers: use strategy ddp"
                for name, parameter in module.named_parameters()
                if parameter.is_complex()
            ]
        )

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` unchanged.

        Raises:
            UserError: ranks start from different weights.
        """
        self._ensure_same_weights(step.module)
        self._buckets = GradientBuckets(self.collective.start_mean)
        return super().wrap(step, one_backward=one_backward)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Multiply learning rates by the number of ranks (`scale_lr`), whose samples a step uses."""
        self._factor = self.world.size if self._scale_lr else 1
        scale_learning_rates(optimizers, schedulers, self._factor)

    @property
    def buckets(self) -> GradientBuckets:
        """The buckets in which gradients are averaged."""
        return self._buckets

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average gradients in buckets of a fixed layout, which have the same bits in every attempt."""
        self._buckets.average(parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the factor by which learning rates were multiplied at the first start of the run."""
        return {"learning_rate_factor": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the factor. States of optimizers and schedulers, loaded later, have scaled rates."""
        saved = state_dict["learning_rate_factor"]
        if saved != self._factor and self.world.is_first:
            log.warning(
                "learning rates keep their factor %d of the run's start; a factor of %d is ignored", saved, self._factor
            )
        self._factor = saved

    def _ensure_same_weights(self, module: nn.Module) -> None:
        # Parameters only: each rank has its own buffers, which differ after an earlier fit.
        mine = {name: _digest(parameter) for name, parameter in module.named_parameters()}
        for rank, theirs in enumerate(self.collective.gather(mine)):
            if different := [name for name in mine if theirs.get(name) != mine[name]]:
                raise UserError(
                    f"ranks {self.world.rank} and {rank} start from different values of {different[0]} "
                    f"(and {len(different) - 1} more): build and load the same module on all ranks."
                )


class HorovodCollective(Collective):
    """Exchanges values by Horovod's allreduce.

    On one machine the ranks meet in a private file and prove to each other that they have read it, before they exchange
    pickles. The key-value store is there; between machines it is a `TCPStore` on rank 0.
    """

    #: the thread of this process in which Horovod runs every exchange
    _loop: ClassVar[Path | None] = None

    def __init__(self) -> None:
        self._rank = 0
        self._root: Store | None = None
        self._stores = self._channels = 0
        self._timeout_s = math.inf

    def init_process_group(self, world: World, device: torch.device) -> None:
        """Connect to the other ranks, as horovodrun or mpirun described them.

        Raises:
            WorldError: they could not be connected, or Horovod knows another number of ranks than the environment.
        """
        self._rank = world.rank
        if not hvd.is_initialized():
            self._init(world)
        if world.nodes == 1 and world.size > 1 and self._root is None:
            self._root = local_store(world)
            with _exchange_errors(world.rank):
                check_gathered(world.rank, self._root, lambda proof: _gather_bytes(proof, "peers", self.wait))

    @staticmethod
    def _init(world: World) -> None:
        before = {*_THREADS.iterdir()}
        with _exchange_errors(world.rank):
            hvd.init()
        new = {*_THREADS.iterdir()} - before
        # Horovod starts this thread first.
        HorovodCollective._loop = min(new, key=lambda thread: int(thread.name), default=None)
        if hvd.size() != world.size:
            raise WorldError(
                f"rank {world.rank} belongs to a world of {world.size}, and Horovod knows of {hvd.size()}: "
                "start the processes by horovodrun."
            )

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        with _exchange_errors(self._rank):
            return _gather(value, "gather", self.wait)

    def start_mean(self, tensor: Tensor, name: str) -> "_Mean":
        """Start to replace `tensor` by its mean over all ranks; exchanges are matched by `name`."""
        with _exchange_errors(self._rank):
            return _Mean(_Exchange(tensor, name, hvd.Average), self)

    def finish(self, exchange: "_Exchange") -> None:
        """Wait for an exchange that was started, with Horovod's errors as WorldError."""
        with _exchange_errors(self._rank):
            self.wait(exchange)

    def all_agree(self, value: bool) -> bool:
        """Return True if `value` is true on all ranks, by one number exchanged on the host."""
        lowest = torch.tensor([int(value)])
        with _exchange_errors(self._rank):
            self.wait(_Exchange(lowest, "agree", hvd.Min))
        return bool(lowest)

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Limit all exchanges but those of side channels. Horovod itself waits for ever."""
        self._timeout_s = timeout_s
        try:
            yield
        finally:
            self._timeout_s = math.inf

    def is_peer_failure(self, error: Exception) -> bool:
        """Return whether `error` was raised because an exchange failed or timed out."""
        return isinstance(error, _RankLost)

    def wait(self, exchange: "_Exchange", timeout_s: float | None = None) -> None:
        """Wait for an exchange for at most `timeout_s`, by default the timeout of training.

        Raises:
            WorldError: it took longer, or Horovod has shut down, as it does when another rank ends.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        while not exchange.is_completed():
            if self._loop is not None and not self._loop.exists() and not exchange.is_completed():
                raise _RankLost("Horovod has ended")  # exchanges that were started meanwhile never complete
            if time.monotonic() > until:
                _leave_at_exit()
                raise _RankLost(f"no answer within {timeout_s:g} s")
            time.sleep(_POLL_S)
        exchange.finish()

    def key_value_store(self) -> Any:
        """Return an empty key-value store of the ranks; every rank calls this equally often."""
        if self._root is None:
            self._root = self._open_store()
        self._stores += 1
        return shared_values(PrefixStore(f"midstride/{self._stores}", self._root), self._rank, hvd.size())

    def side_channel(self) -> SideChannel:
        """Return a new side channel; every rank calls this at the same point."""
        self._channels += 1
        return _SideChannel(self, self._rank, self._channels)

    def _open_store(self) -> Store:
        """Serve a store on rank 0 and broadcast its address; return a client of it on other ranks.

        Rank 0 can be done with the store before it is used, so it waits until all have connected.

        Raises:
            WorldError: some rank could not connect.
        """
        host = os.environ.get("HOROVOD_HOSTNAME", "localhost")
        mine = TCPStore(host, 0, is_master=True, wait_for_workers=False) if self._rank == 0 else None
        host, port = self.broadcast((host, mine.port if mine else 0))
        store, failure = mine, ""
        if store is None:
            try:
                store = TCPStore(host, port, is_master=False)
            except (RuntimeError, OSError) as error:
                failure = str(error).partition("\n")[0]
        faults = {rank: fault for rank, fault in enumerate(self.gather(failure)) if fault}
        if store is None or faults:
            rank, fault = next(iter(faults.items()))
            raise WorldError(f"rank {rank} could not connect to the store of rank 0 at {host}:{port}: {fault}")
        return store


class _Exchange:
    """An allreduce in place of `tensor` by `op`, matched with those of other ranks by `name`.

    When another rank ends, Horovod's thread releases its tensors while it holds Horovod's lock. Releasing the last
    reference takes the GIL, while `allreduce_async_` holds the GIL and waits for Horovod's lock: a deadlock. So a
    reference to each tensor is kept until its exchange has completed.
    """

    _references: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, tensor: Tensor, name: str, op: Any) -> None:
        reference = tensor.detach()
        reference.grad = tensor
        self._handle = hvd.allreduce_async_(tensor, name=name, op=op)
        self._references[self._handle] = reference

    def is_completed(self) -> bool:
        return bool(hvd.poll(self._handle))

    def finish(self) -> None:
        hvd.synchronize(self._handle)
        del self._references[self._handle]


@dataclass
class _Mean:
    """A running exchange of gradients, with the interface of torch's `Work`."""

    exchange: _Exchange
    collective: HorovodCollective

    def is_completed(self) -> bool:
        return self.exchange.is_completed()

    def wait(self) -> None:
        self.collective.finish(self.exchange)


class _SideChannel(SideChannel):
    """Gathers under its own name. Horovod matches exchanges by name in any thread."""

    def __init__(self, collective: HorovodCollective, rank: int, number: int) -> None:
        self._collective, self._rank, self._name = collective, rank, f"channel/{number}"

    def gather(self, value: object) -> list[Any]:
        with _exchange_errors(self._rank):
            return _gather(value, self._name, partial(self._collective.wait, timeout_s=math.inf))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _RankLost(WorldError):
    """Another rank did not answer, or left."""


def _gather(value: object, name: str, wait: Callable[[_Exchange], None]) -> list[Any]:
    """Return every rank's `value`, in the order of ranks."""
    return [pickle.loads(one) for one in _gather_bytes(pickle.dumps(value), name, wait)]


def _gather_bytes(mine: bytes, name: str, wait: Callable[[_Exchange], None]) -> list[bytes]:
    """Return every rank's bytes, as a sum of buffers that are 0 outside of a rank's part."""
    rank = hvd.rank()
    lengths = torch.zeros(hvd.size(), dtype=torch.int64)
    lengths[rank] = len(mine)
    wait(_Exchange(lengths, f"{name}/lengths", hvd.Sum))
    total = int(lengths.sum())
    data = torch.zeros(-(-total // 4), dtype=torch.int32)  # Horovod cannot sum bytes
    values = data.view(torch.uint8)[:total].split(lengths.tolist())
    values[rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    wait(_Exchange(data, f"{name}/data", hvd.Sum))
    return [one.numpy().tobytes() for one in values]


def _leave_at_exit() -> None:
    """Make this process exit without Horovod's shutdown, which would wait for every rank."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(getattr(sys, "last_value", None) is not None))

    atexit.register(leave)


@contextmanager
def _exchange_errors(rank: int) -> Iterator[None]:
    """Turn Horovod's errors in the block into WorldError."""
    try:
        yield
    except (HorovodInternalError, RuntimeError) as error:
        reason = str(error).partition(". ")[0]
        raise _RankLost(f"rank {rank} lost the others in an exchange: {reason}") from error


def _digest(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(numbers.numpy().tobytes())
