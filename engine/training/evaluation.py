"""Validates, tests and predicts: the loops over the batches, in a fit or outside.

Ranks with different numbers of batches evaluate in lockstep: all take as many turns as the rank with the most.
"""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from midstride.engine.checkpointing.boundary import StepBoundary
from midstride.engine.checkpointing.checkpointer import Checkpointer
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LOADER_METHODS, LoaderResolver
from midstride.engine.errors import UserError
from midstride.engine.modules.hooks import bind_step_end, own_hook
from midstride.engine.modules.module import TrainingModule, has_step
from midstride.engine.modules.torch_internals import buffers_of, parameters_of
from midstride.engine.objects.object_state import side_effects_reverted
from midstride.engine.seeds import Generators
from midstride.engine.state.row_shards import is_distributed
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.mixins import ModelParallel
from midstride.engine.strategies.step import STEPS
from midstride.engine.strategies.torch_internals import version_of
from midstride.engine.training.batch_transfer import batch_transfer
from midstride.engine.training.context import EvaluationContext
from midstride.engine.training.fit_objects import evaluated_objects
from midstride.engine.training.lane_scope import LaneScope
from midstride.engine.trees import to_host

__all__ = [
    "EvaluationLoop",
    "EvaluationStage",
    "PredictionLoop",
    "ensure_shared_order",
    "extra_step",
    "setup_evaluation",
]

EvaluationStage = Literal["validate", "test", "predict"]


class EvaluationLoop:
    """Evaluates every batch of every loader once; ranks may have different numbers of batches.

    The engine runs no collective inside a step. If the strategy does, ranks without a batch join it: see
    `lockstep_batches`.

    Args:
        context: context of the evaluation.
        stage: "validate", "test" or "predict". Snapshots may be taken during the validation in a fit.
        loaders: loaders to evaluate, in order.
        checkpointer: checkpointer of the fit that is validated; None if no snapshots are taken.
    """

    def __init__(
        self,
        context: EvaluationContext,
        stage: EvaluationStage,
        loaders: Sequence[ResumableLoader],
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.context, self.loaders = context, loaders
        self.stage: EvaluationStage = stage
        self._checkpointer, self.boundary = checkpointer, StepBoundary(context, checkpointer)
        self._changes = None if checkpointer is None else ValidationChanges(context)
        if checkpointer is not None and self._changes is not None:
            checkpointer.take_only_if(self._changes.allow_snapshot)
        name = STEPS[stage]
        _ensure_loader_numbers(context.module, stage, len(loaders))
        self.prefix = name.removesuffix("_step")  # in the names of hooks, such as on_validation_start
        self.forward = context.strategy.step_call(context.scope, context.module, name)
        self.step_end = bind_step_end(context.module, name)
        self._mode_hooks = [own_hook(context.module, f"on_{self.prefix}_model_{mode}") for mode in ("eval", "train")]
        self.lanes = None if context.lanes is None else LaneScope(context, stage)

    def run(self) -> dict[str, float]:
        """Evaluate, or resume an evaluation; return reduced values by name, none if the limit is 0."""
        context, progress = self.context, self.context.progress
        options = context.options
        limits = {"validate": options.limit_val_batches, "test": options.limit_test_batches}
        if {**limits, "predict": options.limit_predict_batches}[self.stage] == 0:
            return {}
        newest = None if self._changes is None or progress.validating else self._changes.newest
        if newest is not None and self._checkpointer is not None:
            self._checkpointer.snapshot_before(*newest)
        context.metric_logger.begin(self.stage)
        with torch.no_grad(), context.modes.evaluating(*self._mode_hooks):
            if not progress.validating:
                self._begin()
            while progress.val_loader < len(self.loaders):
                context.metric_logger.begin(self.stage, progress.val_loader if len(self.loaders) > 1 else None)
                self.run_loader(progress.val_loader)
                progress.next_validation_loader()
            values = self._end()
            if self._changes is not None:
                self._changes.end()
        context.metric_logger.begin("train")
        return values

    def _begin(self) -> None:
        """Call the first hooks; in a fit, find whether they change the module."""
        hooks, changes = self.context.hooks, self._changes
        if changes is not None:
            changes.begin()
        self.context.progress.begin_validation()
        hooks.call(f"on_{self.prefix}_start")
        hooks.call(f"on_{self.prefix}_epoch_start")
        if changes is not None:
            changes.compare_after_start_hooks()

    def _end(self) -> dict[str, float]:
        """Reduce the logged values and call the last hooks; return the reduced values."""
        context, progress, hooks = self.context, self.context.progress, self.context.hooks
        context.metric_logger.begin(self.stage)
        if hooks.has(f"on_{self.prefix}_epoch_end"):
            context.metric_logger.preview_epoch()
        with context.metric_logger.epoch_hook():
            hooks.call(f"on_{self.prefix}_epoch_end")
        values = context.metric_logger.close_epoch()
        context.metric_logger.begin(self.stage, closed="reduced")
        progress.end_validation()
        hooks.call(f"on_{self.prefix}_end")
        if self.stage == "validate":
            context.reporter.emit("validation", step=progress.step, epoch=progress.epoch, metrics=values)
        return values

    def run_loader(self, number: int) -> None:
        """Evaluate one loader.

        A rank without a batch left waits for the others, or joins the collectives of steps.
        """
        context, progress = self.context, self.context.progress
        to_device = batch_transfer(context, number)
        for batch, own in lockstep_batches(context, self.loaders[number], progress.val_batch):
            if own:
                self.run_batch(to_device(batch), progress.val_batch, number)
            elif context.forward_is_collective:
                with extra_step(context, self.loaders[number]):
                    self.run_step(to_device(batch), progress.val_batch, number)
            if self.lanes is not None:
                self.lanes.end_batch(progress.step, number, progress.val_batch)
            progress.validation_batch_done()
            if self.stage == "validate":
                self.boundary.after_batch()
            else:
                context.mark_step()

    def run_batch(self, batch: Any, index: int, number: int) -> Any:
        """Evaluate one batch of this rank, with its hooks; return the outputs of the step."""
        hooks, extra = self.context.hooks, self._extra(number)
        self.context.metric_logger.begin_batch(batch, self.loaders[number].weight)
        hooks.call(f"on_{self.prefix}_batch_start", batch, index, *extra)
        outputs = self.run_step(batch, index, number)
        hooks.call(f"on_{self.prefix}_batch_end", outputs, batch, index, *extra)
        return outputs

    def run_step(self, batch: Any, index: int, number: int) -> Any:
        """Return the outputs of the user's step, called on the unwrapped module.

        A call of the module as DDP wraps it would broadcast buffers.
        """
        if self.lanes is None:
            return self._call_step(batch, index, number)

        def step(lane_batch: Any) -> Any:
            return self._call_step(lane_batch, index, number)

        outputs = {}
        for lane, lane_batch in batch.items():
            with self.lanes.lane(lane, step, lane_batch, self.context.progress.step, number, index, loader=number):
                outputs[lane] = step(lane_batch)
        # The hook at the end of the batch draws the same numbers on all ranks. Ranks without a batch do not call it;
        # all are seeded again after it.
        self.lanes.end_batch(self.context.progress.step, number, index, 1)
        return outputs

    def _call_step(self, batch: Any, index: int, number: int) -> Any:
        return self.context.scope.run(self.forward, batch, index, *self._extra(number), end=self.step_end)

    def _extra(self, number: int) -> tuple[int, ...]:
        return (number,) if len(self.loaders) > 1 else ()


class PredictionLoop(EvaluationLoop):
    """Evaluation that collects outputs of steps on the host, as a device might not hold all.

    Args:
        context: see `EvaluationLoop`.
        loaders: see `EvaluationLoop`.
        keeps: whether outputs are collected; otherwise they are dropped.
    """

    def __init__(self, context: EvaluationContext, loaders: Sequence[ResumableLoader], *, keeps: bool = True) -> None:
        super().__init__(context, "predict", loaders)
        self._keeps = keeps
        #: for every loader, the outputs for its batches
        self.predictions: list[list[Any]] = [[] for _ in loaders]

    def run_batch(self, batch: Any, index: int, number: int) -> Any:
        """Predict one batch of this rank and collect its outputs, one entry per lane if any."""
        outputs = super().run_batch(batch, index, number)
        if not self._keeps:
            return outputs
        kept = outputs if self.context.device.type == "cpu" else to_host(outputs)
        self.predictions[number] += [kept] if self.lanes is None else kept.values()
        return outputs


def setup_evaluation(
    context: EvaluationContext, stage: EvaluationStage, loaders: LoaderResolver
) -> list[ResumableLoader]:
    """Move the module to its device; return the loaders of `stage`.

    Raises:
        UserError: the module has no step for `stage`, or there is no loader.
    """
    if stage != "predict" or context.module.predict_step is None:  # by default it calls the module
        _ensure_written(context.module, STEPS[stage])
    context.strategy.setup_module(context.module, context.scope)
    resumables = loaders.evaluation(stage)
    if not resumables:
        raise UserError(f"no {stage} loader: define {LOADER_METHODS[stage]}(), or pass loaders to {stage}().")
    return resumables


def _ensure_loader_numbers(module: TrainingModule, stage: EvaluationStage, loaders: int) -> None:
    """Check that steps and hooks take a loader's number if there are several, and only then.

    Raises:
        UserError: a step or hook does not.
    """
    step = STEPS[stage]
    prefix, kind = step.removesuffix("_step"), type(module)
    for name, own in ((step, 2), (f"on_{prefix}_batch_start", 2), (f"on_{prefix}_batch_end", 3)):
        if getattr(kind, name, None) is getattr(TrainingModule, name, None):
            continue
        numbers = (0,) if loaders > 1 else ()
        try:
            inspect.signature(getattr(module, name), follow_wrapped=False).bind(*[None] * own, *numbers)
        except ValueError:  # it has none that could be read
            continue
        except TypeError as error:
            many = f"there are {loaders} {stage} loaders, and {kind.__name__}.{name} takes no dataloader_idx"
            one = f"there is one {stage} loader, and {kind.__name__}.{name} requires further arguments ({error})"
            raise UserError(f"{many if loaders > 1 else one}: write dataloader_idx=0 as its last argument.") from None


def _ensure_written(module: TrainingModule, step: str) -> None:
    if not has_step(module, step):
        raise UserError(f"{type(module).__name__} has no {step}: nothing would be evaluated. Define it.")


_NONE = object()  # a batch may be None


def lockstep_batches(context: EvaluationContext, loader: ResumableLoader, start: int) -> Iterator[tuple[Any, bool]]:
    """Yield pairs of a batch and whether it is this rank's own, from batch `start` on.

    If not, the batch is one to repeat if calls of the module are collectives, and otherwise a placeholder.
    """
    collective, batches = context.collective, loader.batches(0, start)
    most = max(collective.gather(len(loader))) if loader.is_sized else None
    spare: Any = None
    for index in count(start):
        context.inject_fault("validation")
        batch = next(batches, _NONE)
        own = batch is not _NONE
        # Without a length, the ranks agree on the end.
        if collective.all_agree(not own) if most is None else index >= most:
            return
        if index == 0:
            ensure_shared_order(collective, loader, "an evaluation", reads=own)
        if not context.forward_is_collective:
            yield batch, own
            continue
        if own:
            spare = batch
        if index == start:
            spare = _batch_of_another(collective, spare, own)
        yield spare, own


def _batch_of_another(collective: Collective, batch: Any, own: bool) -> Any:
    """Return `batch` if every rank has one, else that of the first rank with one."""
    if collective.all_agree(own):
        return batch
    theirs = [one for has, one in collective.gather((own, batch)) if has]
    return batch if own else theirs[0]


def ensure_shared_order(collective: Collective, loader: ResumableLoader, where: str, *, reads: bool = True) -> None:
    """Compare the orders of the epoch's samplers; every rank calls this at its first batch.

    Args:
        collective: collective of the ranks.
        loader: loader of this rank.
        where: the epoch or evaluation, for the message.
        reads: whether this rank has a batch; without one it has run no sampler.

    Raises:
        UserError: the orders differ.
    """
    if (order := loader.shared_order()) is None:
        return
    orders = [theirs for has_read, theirs in collective.gather((reads, order)) if has_read]
    if len({*orders}) > 1:
        raise UserError(
            f"samplers of different ranks gave different orders in {where} ({', '.join(orders)}), and the ranks share "
            "one order. Give all samplers the same data, as by torch.distributed.all_gather_object, or set "
            "use_distributed_sampler=False."
        )


@contextmanager
def extra_step(context: EvaluationContext, loader: ResumableLoader) -> Iterator[None]:
    """Discard values logged in the block, and revert its changes of module, generators, objects.

    Args:
        context: context of the step.
        loader: loader of its batch.
    """
    generators = Generators(context.generator, devices=context.strategy.devices)
    objects = evaluated_objects(context, loader)
    with side_effects_reverted(context.module, generators, objects), context.metric_logger.muted():
        yield


_HOOKS_OF_START = ("on_validation_start", "on_validation_epoch_start")
_HOOKS_OF_BATCHES = ("on_validation_batch_start", "on_validation_batch_end")
#: bytes of a tensor on an accelerator beyond which only some elements are compared
_SAMPLE_BYTES = 1 << 20


class ValidationChanges:
    """Allows snapshots anywhere but in a validation whose hooks have changed the module.

    A validation without hooks costs nothing; one with hooks two readings of the weights.

    Args:
        context: context of the fit.
    """

    def __init__(self, context: EvaluationContext) -> None:
        self._context, hooks = context, context.hooks
        self._has_start_hooks = any(map(hooks.has, _HOOKS_OF_START))
        # Between steps of a validation, weights of a model-parallel strategy may be gathered or not.
        is_readable = not isinstance(context.strategy, ModelParallel)
        self._has_batch_hooks = is_readable and any(map(hooks.has, _HOOKS_OF_BATCHES))
        self._before: dict[str, Any] | None = None
        self._has_changed = False
        self._began, self._first_boundary = 0.0, 0
        #: boundaries and seconds of the newest validation in which hooks changed the module; None before the first
        self.newest: tuple[int, float] | None = None

    def begin(self) -> None:
        """Note the module, which is in eval mode, before the first hooks of a validation."""
        self._has_changed = False
        self._began, self._first_boundary = time.monotonic(), self._context.progress.after
        self._before = _content(self._context.module) if self._has_start_hooks or self._has_batch_hooks else None

    def compare_after_start_hooks(self) -> None:
        """Compare the module after the first hooks of a validation; every rank calls this."""
        if self._has_start_hooks:
            self._compare()

    def allow_snapshot(self) -> bool:
        """Return whether this state is the run's; every rank calls this at the same boundary."""
        if self._has_batch_hooks and self._context.progress.validating and not self._has_changed:
            if self._before is None:  # resumed within a validation
                self._before = _content(self._context.module)
            self._compare()
        return not self._has_changed

    def end(self) -> None:
        """Note that the validation and its hooks are over."""
        if self._has_changed:
            self.newest = self._context.progress.after - self._first_boundary, time.monotonic() - self._began
        self._has_changed, self._before = False, None

    def _compare(self) -> None:
        has_changed = _content(self._context.module) != self._before
        self._has_changed = any(self._context.collective.gather(has_changed))


def _content(module: nn.Module) -> dict[str, Any]:
    """Return layers, training modes and content of `module` by name."""
    content: dict[str, Any] = {}
    for path, layer in module.named_modules():
        content[path] = id(layer), layer.training
        for kind in (parameters_of(layer), buffers_of(layer)):
            content |= {f"{path}.{name}": _of_tensor(one) for name, one in kind.items() if one is not None}
    return content


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    own = tensor.to_local() if is_distributed(tensor) else tensor
    if own.is_cpu and type(own) in (Tensor, nn.Parameter):
        return id(tensor), tensor_digest(own)
    return id(tensor), tensor_digest(own, _SAMPLE_BYTES), None if own.is_inference() else version_of(own)
