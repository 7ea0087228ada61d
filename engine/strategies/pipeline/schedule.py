"""Runs the micro-batches of a batch through the stages of a pipeline."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from midstride.engine.errors import EngineError
from midstride.engine.objects.object_state import side_effects_reverted
from midstride.engine.seeds import Generators
from midstride.engine.strategies.batch_split import cut
from midstride.engine.strategies.collective import TIMEOUT
from midstride.engine.strategies.mixins import LossOf
from midstride.engine.strategies.pipeline.balance import tensors_of
from midstride.engine.strategies.pipeline.stage import Stage
from midstride.engine.strategies.torch_collective import TorchCollective
from midstride.engine.strategies.torch_internals import schedule_of
from midstride.engine.trees import samples_in

__all__ = ["PipelineLinks", "PipelineLocation", "PipelineSchedule", "first_micro_batch", "micro_batch_count"]

#: number of batch shapes for which a schedule, with its receive buffers, is kept
_SCHEDULES = 6
#: shape, dtype, and whether the tensor has a gradient
Meta = tuple[torch.Size, torch.dtype, bool]


@dataclass(frozen=True)
class PipelineLocation:
    """Position of a rank in its pipeline.

    Args:
        ranks: ranks of this pipeline in the world, from the first stage to the last.
        stage: number of this rank's stage.
        group: process group of these ranks.
        links: process groups of these ranks for sends and receives.
        device: device of this rank.
    """

    ranks: tuple[int, ...]
    stage: int
    group: Any
    links: "PipelineLinks"
    device: torch.device

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the outputs and computes the loss."""
        return self.stage == len(self.ranks) - 1


class PipelineLinks(TorchCollective):
    """The ranks of all pipelines, with process groups for sends and receives between stages.

    With gloo, sends and receives use the timeout with which their group was made: a new timeout needs new groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pipelines: list[list[int]] = []
        self._links: dict[timedelta, Any] = {}
        self._timeout = TIMEOUT

    def connect(self, pipelines: list[list[int]]) -> None:
        """Make the groups of `pipelines`, lists of ranks. Call it on all ranks at the same point."""
        self._pipelines = pipelines
        self._make_groups()

    @contextmanager
    def timeout(self, timeout_s: float) -> Iterator[None]:
        """Limit waits for other ranks in the block. All ranks enter it at the same point."""
        with super().timeout(timeout_s):
            self._timeout = timedelta(seconds=timeout_s)
            self._make_groups()
            try:
                yield
            finally:
                self._timeout = TIMEOUT

    def _make_groups(self) -> None:
        # Not with use_local_synchronization: torch names such a group by the number of groups, which can occur twice.
        if self._timeout not in self._links:
            rank = dist.get_rank()
            made = {rank in ranks: dist.new_group(ranks, timeout=self._timeout) for ranks in self._pipelines}
            self._links[self._timeout] = made.get(True)

    @property
    def current(self) -> Any:
        """The group of this rank's pipeline that has the timeout of now."""
        return self._links[self._timeout]


class PipelineSchedule:
    """Runs batches through all stages of a pipeline. All its ranks make the same calls.

    A batch is cut into as many equal micro-batches as possible. Gradients and batch statistics are added in the order
    of micro-batches under both schedules, which therefore give the same bits.

    Args:
        stage: this rank's layers.
        location: where this rank stands in the pipeline.
        micro_batches: largest number of micro-batches in a batch.
        schedule: "1f1b", where forward and backward passes alternate as soon as possible; or "gpipe", all forward
            passes first, which is used with fewer micro-batches than stages, too.
    """

    def __init__(self, stage: Stage, location: PipelineLocation, micro_batches: int, schedule: str) -> None:
        self._stage, self._location, self._most, self._name = stage, location, micro_batches, schedule
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._target: tuple[LossOf, list[Any]]

    def train(self, x: Any, batch: Any, loss_of: LossOf) -> None:
        """Run forward and backward passes of a batch. Its loss is the mean of its micro-batches.

        Args:
            x: input of the first layer, a tensor or a tuple of tensors; their first dimension is samples.
            batch: the batch from which `x` was made.
            loss_of: returns the loss of the outputs for a micro-batch and the micro-batch; called on the last stage.
        """
        given, count = tensors_of(x), micro_batch_count(x, batch, self._most)
        schedule = self._schedule(given, count, trains=True)
        if self._location.is_last:
            self._target = loss_of, cut(batch, count)
        self._step(schedule, given, target=torch.arange(count))

    def evaluate(self, x: Any) -> Any:
        """Return the outputs for `x` on every rank of the pipeline."""
        with torch.no_grad():
            given = tensors_of(x)
            schedule = self._schedule(given, micro_batch_count(x, x, self._most), trains=False)
            made = self._step(schedule, given, return_outputs=True)
            return self._broadcast_outputs(made)

    def _step(self, schedule: Any, given: tuple[Tensor, ...], **options: Any) -> Any:
        location = self._location
        options = {"return_outputs": False, **options} if location.is_last else {}
        try:
            return schedule.step(*(given if location.stage == 0 else ()), **options)
        except RuntimeError as error:
            if not isinstance(error.__cause__, EngineError):
                raise
            cause = error.__cause__  # the error of a layer
        raise cause  # outside of the except block, so that torch's error is not its context

    def _broadcast_outputs(self, made: Any) -> Any:
        """Return the outputs of the last stage on every rank."""
        location = self._location
        described: list[Any] = [(isinstance(made, tuple), _metas(made)) if location.is_last else None]
        dist.broadcast_object_list(described, src=location.ranks[-1], group=location.group)
        is_tuple, metas = described[0]
        outputs = tensors_of(made) if location.is_last else _empty(metas, location.device)
        for tensor in outputs:
            dist.broadcast(
                tensor.contiguous() if location.is_last else tensor, src=location.ranks[-1], group=location.group
            )
        return tuple(outputs) if is_tuple else outputs[0]

    def _schedule(self, given: tuple[Tensor, ...], count: int, *, trains: bool) -> Any:
        """Return the schedule for this batch shape, with its own buffers. The oldest are dropped."""
        key = tuple((t.shape, t.dtype) for t in given), count, trains
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(given, count, trains=trains)
            if len(self._schedules) > _SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _build_schedule(self, given: tuple[Tensor, ...], count: int, *, trains: bool) -> Any:
        location, stages = self._location, len(self._location.ranks)
        metas = self._shapes(first_micro_batch(given, count))
        # Given all shapes, torch need not infer them by another run of layers and loss.
        ins, outs = (
            tuple(t.requires_grad_(trains and has_gradient) for t, (*_, has_gradient) in zip(made, metas_, strict=True))
            for metas_ in metas[location.stage : location.stage + 2]
            for made in [_empty(metas_, location.device)]
        )
        stage = PipelineStage(
            self._stage,
            location.stage,
            stages,
            location.device,
            input_args=ins,
            output_args=outs,
            group=location.links.current,
        )
        # torch assumes that stage i is on rank i of the group; here the last stage is on its first rank.
        stage.stage_index_to_group_rank = {number: stages - 1 - number for number in range(stages)}
        kind = Schedule1F1B if trains and self._name == "1f1b" and count >= stages else ScheduleGPipe
        return schedule_of(kind, stage, count, loss_fn=self._loss if trains else None, scale_grads=False)

    def _loss(self, outputs: Any, number: Tensor) -> Tensor:
        loss_of, micro_batches = self._target
        return loss_of(outputs, micro_batches[int(number)]) / len(micro_batches)

    def _shapes(self, micro_batch: tuple[Tensor, ...]) -> list[list[Meta]]:
        """Return metas of each stage's inputs and of the last outputs, from a run on zeros."""
        location = self._location
        metas = [[(t.shape, t.dtype, False) for t in micro_batch]]
        for stage, rank in enumerate(location.ranks):
            found: list[Any] = [None]
            if stage == location.stage:
                given = micro_batch if stage == 0 else tuple(t.zero_() for t in _empty(metas[-1], location.device))
                with torch.no_grad(), side_effects_reverted(self._stage, Generators(devices=[location.device])):
                    found = [_metas(self._stage(*given))]
            dist.broadcast_object_list(found, src=rank, group=location.group)
            metas.append(found[0])
        return metas


def micro_batch_count(x: Any, batch: Any, most: int) -> int:
    """Return the largest number, up to `most`, of equal micro-batches of `x` and its batch.

    >>> micro_batch_count(torch.zeros(12), torch.zeros(12), 8), micro_batch_count(torch.zeros(7), torch.zeros(7), 4)
    (6, 1)
    """
    samples = math.gcd(len(tensors_of(x)[0]), samples_in(batch))
    return max(count for count in range(1, most + 1) if samples % count == 0)


def first_micro_batch(x: Any, count: int) -> Any:
    """Return the first of `count` equal micro-batches of `x`: a tensor, or a tuple of them."""
    first = tuple(tensor[: len(tensor) // count] for tensor in tensors_of(x))
    return first if isinstance(x, tuple) else first[0]


def _metas(made: Any) -> list[Meta]:
    return [(tensor.shape, tensor.dtype, tensor.is_floating_point()) for tensor in tensors_of(made)]


def _empty(metas: Sequence[Meta], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in metas)
