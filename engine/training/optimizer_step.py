"""Trains on one batch: forward, backward, and clipping and optimizer at a window's end.

`OptimizerStep` trains, `ForwardBackward` computes gradients as the strategy does it, and `StepCalls` holds the hooks
and other functions that a batch calls, looked up once in a fit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.errors import EngineError, NoLoss, UserCodeError, UserError
from midstride.engine.modules.hooks import bind_step_end, own_hook
from midstride.engine.modules.module import STEP_HOOKS, TrainingModule
from midstride.engine.modules.schedules import largest_window, window_of
from midstride.engine.modules.torch_internals import is_hooked
from midstride.engine.strategies.mixins import (
    BackwardSync,
    MergesOutputs,
    RunsBackward,
    RunsLanes,
    gradient_buckets,
    parameter_check,
)
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.training.closures import (
    closure_faults,
    closure_returning,
    mean_loss,
    needs_closure,
    step_without_closure,
)
from midstride.engine.training.context import FitContext
from midstride.engine.training.fit_warnings import check_gradients
from midstride.engine.training.lane_scope import LaneScope
from midstride.engine.training.losses import Losses, NonFiniteGuard
from midstride.engine.user_code import call_user_code, is_retryable

__all__ = ["OptimizerStep"]

#: entering it costs nothing worth measuring
_NOTHING = nullcontext[None]()


class OptimizerStep:
    """Trains on batches.

    The constructor puts the parts of a step together once, so that steps are cheap.

    Args:
        context: context of the fit.
    """

    def __init__(self, context: FitContext) -> None:
        self.context, self.loader, self.module = context, context.loaders.training, context.module
        self._options = context.options
        self._needs_closure: dict[type[Optimizer], bool] = {}
        self._calls = StepCalls(context)
        self._forward_backward = ForwardBackward(context, self._calls)
        self._take_step = self._plain_or_own_step()
        self._check_parameters = parameter_check(context.strategy)
        self._check_pending = len(context.optimizers) == 1 and context.progress.step == 0
        self._with_gradients: list[Optimizer] = []  # stepped, and gradients not zeroed yet

    @property
    def window(self) -> int:
        """The batches of this epoch that make one step."""
        return window_of(self._options, self.context.callbacks, self.context.progress.epoch)

    @property
    def stepped(self) -> bool:
        """Whether the last batch ended with an optimizer step."""
        return self._forward_backward.ends_window

    def closes_window(self, batches: int) -> bool:
        """Return whether a window of accumulation ends with this number of batches of the epoch."""
        return batches % self.window == 0 or self.loader.at_end

    def window_before(self, index: int) -> range:
        """Return the batches before batch `index` in its window."""
        return range(index - index % self.window, index)

    def train(self, batch: Any, index: int) -> Any:
        """Run the training step on `batch`, and optimizers at a window's end; return its outputs.

        With several optimizers the step runs once for each, with the optimizer's number as its last argument.
        """
        context, forward_backward = self.context, self._forward_backward
        forward_backward.begin_batch(ends_window=self.closes_window(index + 1))
        if not (self.module.automatic_optimization and context.optimizers):
            return forward_backward.forward(batch, index)
        outputs, are_several = None, len(context.optimizers) > 1
        for number, optimizer in enumerate(context.optimizers):
            extra = (number,) if are_several else ()
            with self._alone(optimizer) if are_several else _NOTHING:
                if self._check_parameters is not None:
                    self._check_parameters(optimizer, self.module)
                by_closure = self._needs_closure.get(type(optimizer))
                if self._check_class(optimizer) if by_closure is None else by_closure:
                    outputs = self._step_by_closure(optimizer, batch, index, extra)
                    continue
                outputs = forward_backward.run(batch, index, extra)
                if forward_backward.ends_window:
                    self._step(optimizer)
        self._end_batch(index)
        return outputs

    def _end_batch(self, index: int) -> None:
        """Count a batch without a loss, and adapt the scale of 16-bit gradients."""
        context, forward_backward = self.context, self._forward_backward
        if index == 0:
            context.metric_logger.metrics.warn_of_graphs()
        if not forward_backward.had_loss:
            is_last = forward_backward.ends_window and context.progress.step + 1 == self._options.max_steps
            forward_backward.losses.record_missing(index, last=is_last)
        if context.precision.scales:
            context.precision.update()

    @contextmanager
    def _alone(self, optimizer: Optimizer) -> Iterator[None]:
        """Let only the parameters of `optimizer` collect gradients in the block, from zero."""
        self.zero_grad()  # earlier optimizers may share its parameters
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [p for p in self.module.parameters() if id(p) not in mine and p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def _check_class(self, optimizer: Optimizer) -> bool:
        """Return whether optimizers of this class need a closure; called once for each class.

        Raises:
            UserError: they do, and the options or the strategy exclude it. `_fit_errors` has not seen an optimizer that
                was replaced after the start.
        """
        needed = self._needs_closure[type(optimizer)] = needs_closure(optimizer)
        options = largest_window(self._options, self.context.callbacks)
        if faults := closure_faults([optimizer], options, self.context.strategy):
            raise UserError("\n".join(faults))
        return needed

    def _step(self, optimizer: Optimizer) -> None:
        self.context.strategy.reduce_gradients(self.module.parameters())
        if self._check_pending:
            self._check_first_step(optimizer)
        for call in self._calls.before_step:
            call(optimizer)
        self._take_step(optimizer)
        self._with_gradients.append(optimizer)

    def forget_batch(self) -> None:
        """Forget the optimizers stepped on a batch that is trained on again."""
        self._with_gradients.clear()

    def zero_grad(self) -> None:
        """Zero the gradients of stepped optimizers, after `on_train_batch_end` could read them."""
        while self._with_gradients:
            optimizer = self._with_gradients.pop(0)
            for call in self._calls.zero_grad:
                call(optimizer)

    def _plain_or_own_step(self) -> Callable[[Optimizer], object]:
        """Return a function that steps an optimizer that needs no closure."""
        progress, given_none = self.context.progress, partial(step_without_closure, self.context.precision.step)
        if (step := self._calls.own.get("optimizer_step")) is None:
            return lambda optimizer: call_user_code(f"{type(optimizer).__name__}.step", given_none, optimizer)
        return lambda optimizer: step(
            progress.epoch, progress.batch, optimizer, closure_returning(self._forward_backward.loss, optimizer)
        )

    def _check_first_step(self, optimizer: Optimizer) -> None:
        """Check once that the loss gives parameters of `optimizer` a gradient."""
        if self._forward_backward.had_loss:
            self._check_pending = False
            check_gradients(optimizer, self.module)

    def _step_by_closure(self, optimizer: Optimizer, batch: Any, index: int, extra: tuple[int, ...]) -> Any:
        """Step an optimizer whose closure evaluates `batch`; log values of the first evaluation."""
        context, forward_backward = self.context, self._forward_backward
        first: list[Any] = []

        @torch.enable_grad()  # a step of an optimizer may run without
        def closure() -> float:
            optimizer.zero_grad()
            with forward_backward.reevaluating() if first else nullcontext():
                outputs = forward_backward.run(batch, index, extra)
            if (loss := forward_backward.losses.read(outputs)) is None:
                raise NoLoss(
                    f"{type(optimizer).__name__} needs a loss for every batch, and batch {index} has none: return one "
                    "from training_step."
                )
            first.append(outputs)
            context.strategy.reduce_gradients(self.module.parameters())
            for call in self._calls.before_step:
                call(optimizer)
            return mean_loss(loss, context.collective)

        if (step := self._calls.own.get("optimizer_step")) is None:
            optimizer.step(closure)
        else:
            step(context.progress.epoch, context.progress.batch, optimizer, closure)
        if not first:
            kind = type(optimizer).__name__
            raise UserError(
                f"{type(self.module).__name__}.optimizer_step never called its closure, which evaluates the batch for "
                f"{kind}: nothing was computed for batch {index}. Call optimizer.step(optimizer_closure) there."
            )
        self._with_gradients.append(optimizer)
        return first[0]

    def step_schedulers(self, interval: Literal["epoch", "step"], count: int, *, watching: bool) -> None:
        """Step the schedulers of `interval` due after `count` epochs, or batches of an epoch.

        Args:
            interval: "epoch" or "step".
            count: epochs, or batches of the epoch.
            watching: whether to step those that watch a logged value, or the others.
        """
        if not self.module.automatic_optimization:
            return
        step = self._calls.own.get("lr_scheduler_step")
        for config in self.context.schedulers:
            if config.interval == interval and config.reduce_on_plateau == watching and config.due(count):
                config.step(self.context.metric_logger.values, step)


class ForwardBackward:
    """Runs forward and backward of batches, in the way of the strategy.

    Args:
        context: context of the fit.
        calls: hooks and other functions to call on the way.
    """

    def __init__(self, context: FitContext, calls: "StepCalls") -> None:
        self._context, self._module, self._calls = context, context.module, calls
        self._window = largest_window(context.options, context.callbacks).accumulate_grad_batches
        self._end = _step_end(context)
        self._forward, self._backward = self._forward_pass(), self._backward_pass()
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
        self.run = self._way_of_strategy()

    def begin_batch(self, *, ends_window: bool) -> None:
        """Begin a batch; `ends_window` if an optimizer step follows it."""
        self.ends_window, self.had_loss = ends_window, False

    def forward(self, batch: Any, index: int) -> Any:
        """Return the outputs of the training step, without a backward pass."""
        for fault in self._calls.before_forward:
            fault()
        return self._forward(batch, index)

    @contextmanager
    def reevaluating(self) -> Iterator[None]:
        """Evaluate a batch once more in the block, without logging and checks of losses."""
        self._is_reevaluation = True
        try:
            with self._context.metric_logger.muted():
                yield
        finally:
            self._is_reevaluation = False

    def _way_of_strategy(self) -> Callable[[Any, int, tuple[int, ...]], Any]:
        """Return the function that `run` is."""
        strategy = self._context.strategy
        if isinstance(strategy, RunsBackward):
            return partial(self._run_schedule, strategy)
        if isinstance(strategy, RunsLanes):
            return partial(self._run_lanes, strategy)
        if isinstance(strategy, BackwardSync) and self._window > 1:
            return partial(self._accumulate, strategy)
        return self._run_whole

    def _forward_pass(self) -> Callable[..., Any]:
        """Return a function that runs the training step, `training_step_end` and autocast."""
        context = self._context
        # nn.Module.__call__ costs as much as ten function calls; it is not needed if no strategy has wrapped the step.
        is_bare = type(context.step) is TrainingStep and not is_hooked(context.step)
        forward = context.step.forward if is_bare else context.step
        if context.precision.is_plain and self._end is None:
            return forward
        return partial(context.scope.run, forward, end=self._end)

    def _backward_pass(self) -> Callable[[Tensor], object]:
        """Return a function that runs the backward pass, with averaging at the end of a window."""
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
            return self._run_whole(batch, index, number)
        with strategy.no_backward_sync(self._context.step):
            return self._run_whole(batch, index, number)

    def _run_whole(self, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Run forward and backward of a batch; return its outputs, or None if it is left out."""
        calls, guard = self._calls, self._nonfinite_guard
        undo = None if guard is None else guard.rollback_point()
        for fault in calls.before_forward:
            fault()
        outputs = self._forward(batch, index, *number)
        loss = self.loss = self._loss(outputs)
        if loss is None:
            return outputs
        if guard is not None and guard.skip_if_nonfinite(loss, undo):
            self.ends_window = self.ends_window and guard.close_window()
            return None
        for call in calls.before_backward:
            call(loss)
        try:
            self._backward(loss)
        except RuntimeError as error:
            raise _error_of_backward(error, self._module) from error
        for hook in calls.after_backward:
            hook()
        return outputs

    def _run_schedule(self, strategy: RunsBackward, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Run forward and backward of micro-batches; return their mean loss on its rank."""
        context, losses = self._context, []
        weight = context.metric_logger.weight

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
        context.metric_logger.begin_batch(batch, weight)
        mean = torch.stack(losses).mean() if losses else None
        context.inject_fault("backward", None, mean)
        context.hooks.call("on_after_backward")
        return None if mean is None else {"loss": mean}

    def _run_lanes(self, strategy: RunsLanes, batch: dict[int, Any], index: int, number: tuple[int, ...]) -> Any:
        """Run forward and backward lane by lane; return the mean loss of this rank's lanes."""
        context, scope, losses = self._context, self._lanes, []
        assert scope is not None  # set if the strategy has lanes
        context.inject_fault("forward")
        epoch = context.progress.epoch

        def step(lane_batch: Any) -> Any:
            return self._forward(lane_batch, index)

        with strategy.batch():
            for lane, lane_batch in batch.items():
                with scope.lane(lane, step, lane_batch, epoch, index), strategy.lane(lane):
                    loss = self._loss(step(lane_batch))
                    assert loss is not None  # refused with lanes
                    losses.append(loss.detach())
                    context.hooks.call("on_before_backward", loss)
                    self._calls.backward(loss)
        scope.end_batch(epoch, index)
        self.loss = torch.stack(losses).mean()
        context.inject_fault("backward", None, self.loss)
        context.hooks.call("on_after_backward")
        return {"loss": self.loss}

    def _loss(self, outputs: Any) -> Tensor | None:
        loss = self.losses.read(outputs)
        if loss is not None:
            self.had_loss = True
            if self._nonfinite_guard is None and not self._is_reevaluation:
                self._context.finite_losses.check(loss)
        return loss


def _error_of_backward(error: RuntimeError, module: TrainingModule) -> Exception:
    """Return the error to raise for one of the backward pass, whose frames are not the user's."""
    where = f"the backward pass of the loss that {type(module).__name__}.training_step returned"
    if isinstance(error, EngineError) or is_retryable(error):
        return error
    way = ""
    if "backward through the graph a second time" in str(error):
        way = (
            "training_step called loss.backward() itself, or kept a graph of an earlier step: return the loss alone, "
            "or set automatic_optimization = False and call self.manual_backward(loss). "
        )
    return UserCodeError(f"{where} failed. {way}{type(error).__name__}: {error}")


def _step_end(context: FitContext) -> Callable[[Any, Any], Any] | None:
    """Return a function that calls `training_step_end` and merges chunks, if needed."""
    end, strategy = bind_step_end(context.module, "training_step"), context.strategy
    if not isinstance(strategy, MergesOutputs):
        return end
    merge = strategy.merge_outputs
    return lambda outputs, batch: merge(outputs if end is None else end(outputs, batch))


_Calls = Sequence[Callable[..., object]]


class StepCalls:
    """Hooks, injected faults, and overridden parts of a step, in the order of calls.

    Args:
        context: context of the fit.
    """

    def __init__(self, context: FitContext) -> None:
        bound, faults_at = context.hooks.bound, context.faults_at
        #: parts of a step that the module overrides: name -> method
        self.own = {name: hook for name in STEP_HOOKS if (hook := own_hook(context.module, name)) is not None}
        self.before_forward: _Calls = faults_at("forward")
        #: called with the loss
        self.before_backward: _Calls = [*bound("on_before_backward"), *faults_at("backward")]
        self.backward = self._backward(context)
        self.after_backward: _Calls = bound("on_after_backward")
        #: called with the optimizer, in the order: faults, unscaling, hooks, clipping
        self.before_step: _Calls = [
            *faults_at("optimizer_step"),
            *([context.precision.unscale] if context.precision.scales else []),
            *bound("on_before_optimizer_step"),
            *self._clipping(context),
        ]
        self.zero_grad: _Calls = [*bound("on_before_zero_grad"), self._zero_grad(context)]

    def _backward(self, context: FitContext) -> Callable[[Tensor], object]:
        """Return a function that runs the backward pass of a loss divided by a window's batches."""
        by, options, callbacks = self.own.get("backward", Tensor.backward), context.options, context.callbacks
        run = partial(context.precision.backward, by=by) if context.precision.scales else by
        if largest_window(options, callbacks).accumulate_grad_batches == 1:
            return run
        return lambda loss: run(loss / window_of(options, callbacks, context.progress.epoch))

    def _clipping(self, context: FitContext) -> _Calls:
        largest, algorithm = context.options.gradient_clip_val, context.options.gradient_clip_algorithm
        clip = self.own.get("configure_gradient_clipping", context.trainer.clip_gradients)
        if largest is None and "configure_gradient_clipping" not in self.own:
            return []
        return [lambda optimizer: clip(optimizer, largest, algorithm)]

    def _zero_grad(self, context: FitContext) -> Callable[[Any], object]:
        progress = context.progress
        if (zero_grad := self.own.get("optimizer_zero_grad")) is None:
            return methodcaller("zero_grad")
        return lambda optimizer: zero_grad(progress.epoch, progress.batch, optimizer)
