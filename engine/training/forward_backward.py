"""Forward and backward of a training batch, in the way of the strategy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midstride.engine.modules.hooks import bind_step_end
from midstride.engine.modules.torch_internals import is_hooked
from midstride.engine.strategies.mixins import BackwardSync, MergesOutputs, RunsBackward, RunsLanes, gradient_buckets
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.training.context import FitContext
from midstride.engine.training.lane_scope import LaneScope
from midstride.engine.training.losses import Losses
from midstride.engine.training.nonfinite import NonFiniteGuard
from midstride.engine.training.step_calls import StepCalls

__all__ = ["ForwardBackward"]


class ForwardBackward:
    """Runs forward and backward of batches. The constructor decides once what they consist of, so that they are cheap.

    Args:
        context: context of the fit.
        calls: hooks and other functions to call on the way.
    """

    def __init__(self, context: FitContext, calls: StepCalls) -> None:
        self._context, self._module, self._calls = context, context.module, calls
        self._window = context.options.accumulate_grad_batches
        self._end = _step_end(context)
        # nn.Module.__call__ costs as much as ten function calls; it is not needed if no strategy has wrapped the step.
        is_bare = type(context.step) is TrainingStep and not is_hooked(context.step)
        self._forward = context.step.forward if is_bare else context.step
        self._run_step, self._backward = context.scope.run, self._backward_pass()
        lanes = context.strategy if isinstance(context.strategy, RunsLanes) else None
        self._lanes = None if lanes is None else LaneScope(context, "train", lanes.restore_buffers)
        skips = context.options.on_nan == "skip" and context.finite_losses.needed
        self._nonfinite_guard = NonFiniteGuard(context) if skips else None
        self._is_reevaluation = False
        self.losses = Losses(context)
        #: whether the current batch ends with an optimizer step
        self.ends_window = False
        #: whether the current batch has had a loss
        self.had_loss = False
        #: the newest loss; None in a pipeline, and if the step returned none
        self.loss: Tensor | None = None
        #: runs a batch, its index, and with several optimizers the number of one; returns the step's outputs
        self.run = self._of_strategy()

    def begin_batch(self, *, ends_window: bool) -> None:
        """Begin a batch; `ends_window` if an optimizer step follows it."""
        self.ends_window, self.had_loss = ends_window, False

    def forward(self, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Return the outputs of the training step, without a backward pass."""
        for fault in self._calls.before_forward:
            fault()
        return self._run_step(self._forward, batch, index, *number, end=self._end)

    @contextmanager
    def reevaluating(self) -> Iterator[None]:
        """In the block, a batch is evaluated once more: nothing is logged, and its losses are not checked."""
        self._is_reevaluation = True
        try:
            with self._context.metric_logger.muted():
                yield
        finally:
            self._is_reevaluation = False

    def _of_strategy(self) -> Callable[[Any, int, tuple[int, ...]], Any]:
        """Return the function that `run` is."""
        strategy = self._context.strategy
        if isinstance(strategy, RunsBackward):
            return partial(self._run_schedule, strategy)
        if isinstance(strategy, RunsLanes):
            return partial(self._run_lanes, strategy)
        if isinstance(strategy, BackwardSync) and self._window > 1:
            return partial(self._accumulate, strategy)
        return self._forward_backward

    def _backward_pass(self) -> Callable[[Tensor], object]:
        """Return a function that runs the backward pass; at the end of a window, averaging of gradients overlaps it."""
        backward, buckets = self._calls.backward, gradient_buckets(self._context.strategy)
        if buckets is None or self._calls.after_backward:  # on_after_backward may change gradients before averaging
            return backward

        def overlapped(loss: Tensor) -> None:
            with buckets.backward(self._module.parameters()) if self.ends_window else nullcontext():
                backward(loss)

        return overlapped

    def _accumulate(self, strategy: BackwardSync, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Run forward and backward; gradients are exchanged only at the end of the window."""
        if self.ends_window:
            return self._forward_backward(batch, index, number)
        with strategy.no_backward_sync(self._context.step):
            return self._forward_backward(batch, index, number)

    def _forward_backward(self, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        calls, guard = self._calls, self._nonfinite_guard
        undo = None if guard is None else guard.rollback_point()
        outputs = self.forward(batch, index, number)
        loss = self.loss = self._loss(outputs)
        if loss is None:
            return outputs
        if guard is not None and guard.skip_if_nonfinite(loss, undo):
            self.ends_window = self.ends_window and guard.close_window()
            return None
        for call in calls.before_backward:
            call(loss)
        self._backward(loss)
        for hook in calls.after_backward:
            hook()
        return outputs

    def _run_schedule(self, strategy: RunsBackward, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Run forward and backward of the micro-batches; return their mean loss on the rank that computes it."""
        context, losses = self._context, []

        def loss_of(outputs: Any, micro_batch: Any) -> Tensor:
            context.metric_logger.begin_batch(micro_batch)
            with context.scope.forward():
                loss = self._loss(outputs if self._end is None else self._end(outputs, micro_batch))
            assert loss is not None  # refused on several processes
            losses.append(loss.detach())
            context.hooks.call("on_before_backward", loss)
            return loss / self._window if self._window > 1 else loss

        context.inject_fault("forward")
        with context.metric_logger.recording(), context.scope.micro_batches():
            strategy.train(context.step, batch, index, loss_of)
        context.metric_logger.begin_batch(batch)
        context.inject_fault("backward")
        context.hooks.call("on_after_backward")
        return {"loss": torch.stack(losses).mean()} if losses else None

    def _run_lanes(self, strategy: RunsLanes, batch: dict[int, Any], index: int, number: tuple[int, ...]) -> Any:
        """Run forward and backward of one lane after the other; return the mean loss of this rank's lanes."""
        context, scope, losses = self._context, self._lanes, []
        assert scope is not None  # set if the strategy has lanes
        context.inject_fault("forward")
        epoch = context.progress.epoch

        def step(lane_batch: Any) -> Any:
            return context.scope.run(self._forward, lane_batch, index, end=self._end)

        with strategy.batch():
            for lane, lane_batch in batch.items():
                with scope.lane(lane, step, lane_batch, epoch, index), strategy.lane(lane):
                    loss = self._loss(step(lane_batch))
                    assert loss is not None  # refused with lanes
                    losses.append(loss.detach())
                    context.hooks.call("on_before_backward", loss)
                    self._calls.backward(loss)
        scope.end_batch(epoch, index)
        context.inject_fault("backward")
        context.hooks.call("on_after_backward")
        self.loss = torch.stack(losses).mean()
        return {"loss": self.loss}

    def _loss(self, outputs: Any) -> Tensor | None:
        loss = self.losses.read(outputs)
        if loss is not None:
            self.had_loss = True
            if self._nonfinite_guard is None and not self._is_reevaluation:
                self._context.finite_losses.check(loss)
        return loss


def _step_end(context: FitContext) -> Callable[[Any, Any], Any] | None:
    """Return a function of outputs and batch that calls `training_step_end` and merges chunks; None if not needed."""
    end, strategy = bind_step_end(context.module, "training_step"), context.strategy
    if not isinstance(strategy, MergesOutputs):
        return end
    merge = strategy.merge_outputs
    return lambda outputs, batch: merge(outputs if end is None else end(outputs, batch))
