"""Horovod: a full replica per process, gradients averaged in buckets of a fixed layout during backward."""

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
from midstride.engine.optim.learning_rates import scale_learning_rates
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.gradient_buckets import GradientBuckets
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import AveragesInBuckets, ReplicatesParameters
from midstride.engine.strategies.side_channel import SideChannel
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.strategies.torch_internals import PrefixStore, Store, TCPStore
from midstride.engine.world import World

__all__ = ["Horovod"]

log = logging.getLogger(__name__)

#: this process's, those included that Python does not know of
_THREADS = Path("/proc/self/task")
#: between two looks at an exchange; Horovod's own waits are as long
_POLL_S = 0.001


class Horovod(ReplicatesParameters, AveragesInBuckets):
    """Replicate the module on every rank and let Horovod average the gradients.

    `hvd.DistributedOptimizer` fuses gradients as they become ready, and the place of a number in the
    fused buffer decides the order in which it is summed: at three ranks and more two runs of one script
    differ in their last bits. So there is an ordinary optimizer here, and buffers of a fixed layout, one
    after another: gradients in the order of `parameters()`, then a 1 or 0 for each parameter, whether it
    took part on this rank. One that took part nowhere keeps no gradient; one that took part elsewhere
    counts as zero here.

    Args:
        scale_lr: multiply every learning rate, of schedulers too, by the number of processes at the first
            start. It is part of a run's state: a later attempt keeps what the first one had.
    """

    name = "horovod"
    collective: "HorovodCollective"

    def __init__(self, *, scale_lr: bool = True) -> None:
        super().__init__(HorovodCollective())
        self._buckets = GradientBuckets(self.collective.start_mean)
        self._scale_lr = scale_lr
        self._factor = 1

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return what Horovod cannot sum: gradients that are sparse or complex."""
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
        """Return `step` as it is.

        Raises:
            UserError: ranks start from different weights.
        """
        self._check_alike(step.module)
        self._buckets = GradientBuckets(self.collective.start_mean)
        return super().wrap(step, one_backward=one_backward)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Scale what `configure_optimizers` returned: a step sees the samples of all ranks."""
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
        """Return by what the learning rates were multiplied at the first start."""
        return {"learning_rate_factor": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take the factor back: optimizers and schedulers, which come after, bring their scaled rates along."""
        saved = state_dict["learning_rate_factor"]
        if saved != self._factor and self.world.is_first:
            log.warning(
                "learning rates were multiplied by %d at the first start, and stay so, not %d", saved, self._factor
            )
        self._factor = saved

    def _check_alike(self, module: nn.Module) -> None:
        # Buffers are each rank's own: after one fit they differ, and the next may go on from there.
        mine = {name: _digest(parameter) for name, parameter in module.named_parameters()}
        for rank, theirs in enumerate(self.collective.gather(mine)):
            if different := [name for name in mine if theirs.get(name) != mine[name]]:
                raise UserError(
                    f"ranks {self.world.rank} and {rank} start from different values of {different[0]} "
                    f"(and {len(different) - 1} more): build the module alike on every rank, and load weights on each."
                )


class HorovodCollective(Collective):
    """Values over Horovod's own exchanges; a key-value store of torch's on rank 0."""

    #: the thread of this process in which Horovod carries out every exchange
    _loop: ClassVar[Path | None] = None

    def __init__(self) -> None:
        self._rank = 0
        self._root: Store | None = None
        self._stores = self._channels = 0
        self._timeout_s = math.inf

    def init_process_group(self, world: World, device: torch.device) -> None:
        """Meet the other ranks, as horovodrun or mpirun described them.

        Raises:
            WorldError: they could not be met, or are not as many as the environment says.
        """
        self._rank = world.rank
        if hvd.is_initialized():
            return
        before = {*_THREADS.iterdir()}
        with _meeting_errors(world.rank):
            hvd.init()
        new = {*_THREADS.iterdir()} - before
        HorovodCollective._loop = min(new, key=lambda thread: int(thread.name), default=None)  # which it starts first
        if hvd.size() != world.size:
            raise WorldError(
                f"rank {world.rank} belongs to a world of {world.size}, and Horovod knows of {hvd.size()}: "
                "start the processes by horovodrun, which tells Horovod of each other."
            )

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        with _meeting_errors(self._rank):
            return _gather(value, "gather", self.wait)

    def start_mean(self, tensor: Tensor, name: str) -> "_Mean":
        """Begin to put the mean of every rank's `tensor` in its place."""
        with _meeting_errors(self._rank):
            return _Mean(_Exchange(tensor, name, hvd.Average), self)

    def finish(self, exchange: "_Exchange") -> None:
        """Wait for an exchange that has begun."""
        with _meeting_errors(self._rank):
            self.wait(exchange)

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on every rank, at the price of one number exchanged on the host."""
        lowest = torch.tensor([int(value)])
        with _meeting_errors(self._rank):
            self.wait(_Exchange(lowest, "agree", hvd.Min))
        return bool(lowest)

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Bound every exchange but those beside training: Horovod waits for ever for a rank that does not answer."""
        self._timeout_s = timeout_s
        try:
            yield
        finally:
            self._timeout_s = math.inf

    def is_peer_failure(self, error: Exception) -> bool:
        """Return whether `error` says that an exchange failed, or took too long."""
        return isinstance(error, _RankLost)

    def wait(self, exchange: "_Exchange", timeout_s: float | None = None) -> None:
        """Wait for an exchange, which may take as long as those in training do, or `timeout_s`.

        Raises:
            WorldError: it took longer, or Horovod has ended, as it does where another rank does.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        while not exchange.is_completed():
            if self._loop is not None and not self._loop.exists() and not exchange.is_completed():
                raise _RankLost("Horovod has ended")  # and does not answer what was asked for meanwhile
            if time.monotonic() > until:
                _leave_at_exit()
                raise _RankLost(f"no answer within {timeout_s:g} s")
            time.sleep(_POLL_S)
        exchange.finish()

    def key_value_store(self) -> Store:
        """Return a new corner of a key-value store on rank 0; every rank calls this equally often."""
        if self._root is None:
            self._root = self._open_store()
        self._stores += 1
        return PrefixStore(f"midstride/{self._stores}", self._root)

    def side_channel(self) -> SideChannel:
        """Return a way to exchange values beside training; every rank calls this at the same point."""
        self._channels += 1
        return _SideChannel(self, self._rank, self._channels)

    def _open_store(self) -> Store:
        """Rank 0 opens a store and tells the others where."""
        host = os.environ.get("HOROVOD_HOSTNAME", "localhost")
        mine = TCPStore(host, 0, is_master=True, wait_for_workers=False) if self._rank == 0 else None
        host, port = self.broadcast((host, mine.port if mine else 0))
        return mine or TCPStore(host, port, is_master=False)


class _Exchange:
    """What `op` makes of every rank's `tensor` on its way into its place; what meets has the same `name`.

    Where another rank ends, Horovod's thread lets go of every tensor that it has, under the lock that the next
    `allreduce_async_` takes with Python's own lock in hand. The last of a tensor's references outside Python takes
    Python's lock to be dropped, and both would wait for ever: another reference is kept until all went well.
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
    """An exchange of gradients that has begun."""

    exchange: _Exchange
    collective: HorovodCollective

    def is_completed(self) -> bool:
        return self.exchange.is_completed()

    def wait(self) -> None:
        self.collective.finish(self.exchange)


class _SideChannel(SideChannel):
    """Gathers under names of its own: Horovod matches exchanges by name, whatever thread they come from."""

    def __init__(self, collective: HorovodCollective, rank: int, number: int) -> None:
        self._collective, self._rank, self._name = collective, rank, f"channel/{number}"

    def gather(self, value: object) -> list[Any]:
        with _meeting_errors(self._rank):
            return _gather(value, self._name, partial(self._collective.wait, timeout_s=math.inf))

    def close(self) -> None:
        """Nothing was opened."""


class _RankLost(WorldError):
    """Another rank did not answer, or left."""


def _gather(value: object, name: str, wait: Callable[[_Exchange], None]) -> list[Any]:
    """Return every rank's `value`: as sums, in which every byte is of one rank, and 0 on all others."""
    mine, rank = pickle.dumps(value), hvd.rank()
    lengths = torch.zeros(hvd.size(), dtype=torch.int64)
    lengths[rank] = len(mine)
    wait(_Exchange(lengths, f"{name}/lengths", hvd.Sum))
    total = int(lengths.sum())
    data = torch.zeros(-(-total // 4), dtype=torch.int32)  # Horovod has no sums of bytes
    values = data.view(torch.uint8)[:total].split(lengths.tolist())
    values[rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    wait(_Exchange(data, f"{name}/data", hvd.Sum))
    return [pickle.loads(one.numpy().tobytes()) for one in values]


def _leave_at_exit() -> None:
    """Have this process end as it would, but for Horovod's own end, which waits for every rank."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(getattr(sys, "last_value", None) is not None))

    atexit.register(leave)


@contextmanager
def _meeting_errors(rank: int) -> Iterator[None]:
    """Say what Horovod's error in an exchange means."""
    try:
        yield
    except (HorovodInternalError, RuntimeError) as error:
        reason = str(error).partition(". ")[0]
        raise _RankLost(f"rank {rank} lost the others in an exchange: {reason}") from error


def _digest(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(numbers.numpy().tobytes())
