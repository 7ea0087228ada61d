"""DDP in lanes: a replica per process; sums independent of the number of processes."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import NotExact
from midstride.engine.lanes import Lanes, tree_joins
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.torch_internals import buffers_of
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import SingleProcess
from midstride.engine.strategies.flat_tensors import bucket_indices, view_like
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import RunsLanes, WatchesFrozen
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.strategies.torch_collective import TorchCollective, broadcast
from midstride.engine.strategies.torch_internals import foreach_add_, foreach_copy_, foreach_mul
from midstride.engine.world import World

__all__ = ["OrderedDdp", "OrderedReducer"]


class OrderedDdp(RunsLanes, WatchesFrozen, Strategy):
    """Replicates the module, and sums gradients of lanes in one order on any number of ranks.

    Args:
        lanes: number of equal parts of every batch; a power of two, and a multiple of the number of ranks.
    """

    name = "ddp"

    def __init__(self, *, lanes: int) -> None:
        super().__init__()
        self._count = lanes
        self._reducer: OrderedReducer | None = None

    def attach(self, world: World, devices: Sequence[torch.device]) -> None:
        """Set world and devices; a single rank needs no process group."""
        super().attach(world, devices)
        self.collective = TorchCollective() if world.size > 1 else SingleProcess()

    @property
    def lanes(self) -> Lanes:
        """All lanes of a batch, and which of them this rank runs."""
        return Lanes(self._count, self.world.rank, self.world.size)

    @property
    def identity(self) -> str:
        """The name and the number of lanes; the number of ranks does not change the bits."""
        return f"{self.name}(lanes={self._count})"

    @property
    def data_world(self) -> World:
        """A world with one rank per lane, in which this process is the rank of its first lane."""
        return World(rank=self.lanes.own.start, size=self._count, local_size=self._count)

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on parts of `module` that lanes do not support."""
        errors = super().module_errors(module)
        if not module.automatic_optimization:
            errors.append(
                "lanes with automatic_optimization=False: use automatic optimization, or leave lanes out. The engine "
                "calls the backward pass of each lane itself"
            )
        for path, submodule in module.named_modules():
            if isinstance(submodule, nn.SyncBatchNorm):
                errors.append(
                    f"lanes with {path}, a SyncBatchNorm: use BatchNorm, which normalises over a lane. SyncBatchNorm "
                    "normalises over the ranks, whose number can change"
                )
        return errors + [
            f"lanes with {path}, whose gradients are sparse: lanes add up dense ones: set sparse=False"
            for path in sparse_layers(module)
        ]

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return messages on settings of a fit that lanes do not support."""
        errors = []
        if len(optimizers) > 1:
            errors.append(f"lanes with {len(optimizers)} optimizers: a step has one: use one with parameter groups")
        if options.on_nan == "skip":
            errors.append("lanes with on_nan='skip': a batch is left out by all lanes or by none: set on_nan='fail'")
        return errors

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` itself: hooks on the parameters collect gradients as they become ready."""
        if self.world.size > 1:
            broadcast(step)
        self.watch_frozen(step.module)
        self._reducer = OrderedReducer(step.module, self.lanes)
        return step

    def batch(self) -> AbstractContextManager[None]:
        """Return the context of a batch's lanes. At its end gradients and buffers are their means."""
        assert self._reducer is not None  # set by wrap
        return self._reducer.batch()

    def lane(self, lane: int) -> AbstractContextManager[None]:
        """Return the context of the forward and backward pass of `lane`."""
        assert self._reducer is not None
        return self._reducer.lane(lane)

    def restore_buffers(self) -> None:
        """Restore the module's buffers to their values at the start of the batch."""
        assert self._reducer is not None
        self._reducer.restore_buffers()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: gradients were averaged at the end of the batch."""

    def is_replicated(self, path: str) -> bool:
        """Return True if the part of `path` is equal on all ranks, unlike metrics and logged values."""
        return path.partition("/")[0] in ("module", "optimizers", "gradients", "buffers")


#: of gradients that are exchanged together
_BUCKET_BYTES = 5 << 20
#: elements: slices are multiples of it, so that each is whole cache lines for any dtype
_ALIGNED = 16


class _Bucket:
    """Sums tensors over lanes in a flat tensor, followed by counts of lanes that had each.

    Args:
        like: tensors of the same shapes, all of one dtype and on one device.
        lanes: the number of lanes of this rank decides the number of partial sums.
    """

    def __init__(self, like: Sequence[Tensor], lanes: Lanes) -> None:
        self.ready: set[int] = set()
        self._missed: set[int] = set()
        self._used = torch.ones(len(like), dtype=like[0].dtype, device=like[0].device)
        size = sum(tensor.numel() for tensor in like) + len(like)
        self._size = size - size % -(_ALIGNED * lanes.size)
        self._levels = [self._level(like) for _ in range(max(1, len(lanes.own).bit_length() - 1))]
        #: receives one slice of the sum of each other rank
        self.inbox = torch.zeros(self._size if lanes.size > 2 else 0, dtype=like[0].dtype, device=like[0].device)

    def _level(self, like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        flat = torch.zeros(self._size, dtype=like[0].dtype, device=like[0].device)
        views, start = [], 0
        for tensor in [*like, self._used]:
            views.append(view_like(tensor, flat[start : start + tensor.numel()]))
            start += tensor.numel()
        return flat, views

    @property
    def flat_sum(self) -> Tensor:
        """The sum over the lanes of this rank, complete after the last `deposit`."""
        return self._levels[-1][0]

    @property
    def sums(self) -> list[Tensor]:
        """Views of `flat_sum`, one for each tensor."""
        return self._levels[-1][1][:-1]

    @property
    def had(self) -> list[bool]:
        """Presence of each tensor in any lane. Reads the device only if all lanes here lacked one."""
        if not self._missed:
            return [True] * len(self.sums)
        return [bool(lanes) for lanes in self._levels[-1][1][-1].tolist()]

    def deposit(self, number: int, tensors: Sequence[Tensor | None]) -> None:
        """Add the tensors of this rank's lane `number` (from 0) to the partial sums of the tree.

        A missing tensor counts as zeros: to skip it could change the sign of a zero in the sum.
        """
        views, missing = self._levels[0][1], {i for i, tensor in enumerate(tensors) if tensor is None}
        self._missed = self._missed & missing if number else missing
        if missing:
            self._used.copy_(torch.tensor([0.0 if i in missing else 1.0 for i in range(len(tensors))]))
        given = [torch.zeros_like(views[i]) if tensor is None else tensor for i, tensor in enumerate(tensors)]
        take = foreach_add_ if number & 1 else foreach_copy_
        take(views, [*given, self._used])
        if missing:
            self._used.fill_(1)
        levels, level = self._levels, 0
        while number & 1 and level + 1 < len(levels):
            number >>= 1
            if not number & 1:
                levels[level], levels[level + 1] = levels[level + 1], levels[level]
                return
            levels[level + 1][0].add_(levels[level][0])
            level += 1


class OrderedReducer:
    """Averages the gradients and buffers of a module over all lanes.

    Every lane starts from the buffers as they were before the batch. Floating-point buffers become the mean over the
    lanes; other buffers, such as counters, must be changed in the same way by every lane.

    A batch is::

        with reducer.batch():
            for lane in lanes.own:
                with reducer.lane(lane):
                    loss(model(x[lane]), y[lane]).backward()

    Args:
        module: its parameters that require a gradient now are averaged.
        lanes: all lanes, and those that this rank runs.
    """

    def __init__(self, module: nn.Module, lanes: Lanes) -> None:
        self._lanes = lanes
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._named = list(reversed(named))
        self._parameters = [parameter for _, parameter in self._named]
        self._layout = bucket_indices(self._parameters, _BUCKET_BYTES)
        self._buckets = [_Bucket([self._parameters[i] for i in bucket], lanes) for bucket in self._layout]
        self._buffers = _Buffers(module, lanes)
        # An own process group, so that no other collective comes between two exchanges.
        self._group: Any = dist.new_group() if lanes.size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ordered-reducer") if lanes.size > 1 else None
        self._under_way: list[Future[None]] = []
        self._run = 0
        self._done = [True] * len(self._buckets)
        self._is_open = False
        for number, bucket in enumerate(self._layout):
            for i in bucket:
                self._parameters[i].register_post_accumulate_grad_hook(partial(_note, weakref.ref(self), number, i))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context of this rank's lanes. At its end each gradient is the mean over all lanes.

        The mean is added to gradients that were accumulated from earlier batches.
        """
        # Copies, because an accumulated gradient can be a view of the bucket that sums this batch.
        collected = [None if parameter.grad is None else parameter.grad.clone() for parameter in self._parameters]
        self._run, self._under_way = 0, []
        self._buffers.begin()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        assert self._run == len(self._lanes.own), "every lane of this rank is run in a batch"
        for buffers in self._buffers.buckets:
            self._submit(buffers, 1.0)
        for future in self._under_way:
            future.result()
        for bucket, indices in zip(self._buckets, self._layout, strict=True):
            for i, gradient, had in zip(indices, bucket.sums, bucket.had, strict=True):
                mine = gradient if had else None  # None rather than zeros, which an optimizer would act on
                before = collected[i]
                self._parameters[i].grad = mine if before is None else before if mine is None else before + mine
        self._buffers.end()

    @contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        """Context of the forward and backward pass of `lane`, the next lane of this rank."""
        assert lane == self._lanes.own[self._run], "lanes are run in their order"
        self._buffers.restore()
        for parameter in self._parameters:
            parameter.grad = None
        self._done = [False] * len(self._buckets)
        for bucket in self._buckets:
            bucket.ready.clear()
        yield
        for number, done in enumerate(self._done):
            if not done:
                self._deposit(number)
        self._buffers.deposit(self._run)
        self._run += 1

    def restore_buffers(self) -> None:
        """Restore the buffers to their values at the start of the batch."""
        self._buffers.restore()

    def note_ready(self, number: int, index: int) -> None:
        """Record that the gradient of parameter `index` is ready. Send bucket `number` if complete.

        Raises:
            NotExact: the gradient became ready twice in this lane.
        """
        if not self._is_open:
            return  # a backward pass of user code outside of a training batch, or of a later fit
        bucket = self._buckets[number]
        if self._done[number] or index in bucket.ready:
            raise NotExact(
                f"the gradient of {self._named[index][0]} became ready twice in one backward pass, where lanes have no "
                "order of sums: with torch.utils.checkpoint, set use_reentrant=False"
            )
        bucket.ready.add(index)
        if len(bucket.ready) == len(self._layout[number]):
            self._deposit(number)

    def _deposit(self, number: int) -> None:
        gradients = [self._parameters[i].grad for i in self._layout[number]]
        for i, gradient in zip(self._layout[number], gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise NotExact(
                    f"the gradient of {self._named[i][0]} is sparse, and lanes add up dense ones only: set sparse=False"
                )
        self._buckets[number].deposit(self._run, gradients)
        self._done[number] = True
        if self._run + 1 < len(self._lanes.own):
            return
        # Exchanges start in the order of the layout, which is the same on every rank.
        while len(self._under_way) < len(self._buckets) and self._done[len(self._under_way)]:
            self._submit(self._buckets[len(self._under_way)], 1 / self._lanes.count)

    def _submit(self, bucket: _Bucket, scale: float) -> None:
        if self._thread is not None:
            self._under_way.append(self._thread.submit(self._exchange, bucket, scale))
            return
        done: Future[None] = Future()
        done.set_result(self._exchange(bucket, scale))
        self._under_way.append(done)

    @torch.no_grad()
    def _exchange(self, bucket: _Bucket, scale: float) -> None:
        """Sum over the ranks in the order of the tree, and multiply by `scale`."""
        rank, size = self._lanes.rank, self._lanes.size
        if size <= 2:  # a sum of two terms does not depend on their order
            if size == 2:
                dist.all_reduce(bucket.flat_sum, group=self._group)
            if scale != 1:
                bucket.flat_sum.mul_(scale)
            return
        slices, received = bucket.flat_sum.chunk(size), bucket.inbox.chunk(size)
        terms = [slices[other] if other == rank else received[other] for other in range(size)]
        self._all_to_all(slices, terms)
        for into, source in tree_joins(range(size)):
            terms[into].add_(terms[source])
        torch.mul(terms[0], scale, out=slices[rank])
        self._all_to_all([slices[rank]] * size, slices)

    def _all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send `sent[k]` to rank k and receive `received[k]` from it, for every other rank k."""
        rank, size = self._lanes.rank, self._lanes.size
        others = [(rank + distance) % size for distance in range(1, size)]
        swaps = [dist.P2POp(dist.irecv, received[k], group=self._group, group_peer=k) for k in others]
        swaps += [dist.P2POp(dist.isend, sent[k], group=self._group, group_peer=k) for k in others]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()


def _note(reducer: "weakref.ref[OrderedReducer]", number: int, index: int, _: Tensor) -> None:
    """Call `note_ready` of the reducer, if it exists. Parameters keep hooks of earlier fits."""
    if (there := reducer()) is not None:
        there.note_ready(number, index)


class _Buffers:
    """The buffers of a module, restored at the start of every lane and averaged over the lanes.

    They are looked up by name, because a module can replace a buffer by another tensor.
    """

    def __init__(self, module: nn.Module, lanes: Lanes) -> None:
        self._lanes = lanes
        self._owners: list[tuple[nn.Module, str]] = []
        known: set[int] = set()
        for submodule in module.modules():
            for name, buffer in submodule.named_buffers(recurse=False):
                if id(buffer) not in known:
                    known.add(id(buffer))
                    self._owners.append((submodule, name))
        self._before: list[Tensor] = []
        kinds: dict[Any, list[int]] = {}
        for number, buffer in enumerate(self._tensors()):
            if buffer.is_floating_point() and buffer.numel():
                kinds.setdefault((buffer.dtype, buffer.device), []).append(number)
        self._layout = list(kinds.values())
        self.buckets = [_Bucket([self._tensors()[i] for i in numbers], lanes) for numbers in self._layout]

    def _tensors(self) -> list[Tensor]:
        return [buffers_of(owner)[name] for owner, name in self._owners]  # type: ignore[misc]  # none is None

    def begin(self) -> None:
        """Copy the values from which every lane starts."""
        tensors = self._tensors()
        if len(self._before) != len(tensors):
            self._before = [tensor.clone() for tensor in tensors]
        elif tensors:
            foreach_copy_(self._before, tensors)

    def restore(self) -> None:
        """Set the buffers to the values from which every lane starts."""
        if self._before:
            foreach_copy_(self._tensors(), self._before)

    def deposit(self, number: int) -> None:
        """Add the buffers after this rank's lane `number` (from 0) to the sums."""
        tensors = self._tensors()
        for bucket, indices in zip(self.buckets, self._layout, strict=True):
            # Scaled before the sum, so that values at the end of the range of a dtype, as in masks, do not overflow.
            bucket.deposit(number, foreach_mul([tensors[i] for i in indices], 1 / self._lanes.count))

    def end(self) -> None:
        """Set the buffers to the means."""
        tensors = self._tensors()
        for bucket, indices in zip(self.buckets, self._layout, strict=True):
            foreach_copy_([tensors[i] for i in indices], bucket.sums)
