"""How a batch becomes part of a step: forward, backward, accumulation, clipping, the optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.errors import NoLoss, UserError
from midstride.engine.modules.hooks import bind_step_end, own_hook
from midstride.engine.modules.module import STEP_HOOKS
from midstride.engine.strategies.mixins import BackwardSync, MergesOutputs, RunsBackward, RunsLanes
from midstride.engine.training.closures import mean_loss, needs_closure
from midstride.engine.training.context import FitContext
from midstride.engine.training.fit_warnings import check_gradients
from midstride.engine.training.lane_scope import LaneScope
from midstride.engine.training.losses import Losses
from midstride.engine.training.nonfinite import NonFiniteGuard

__all__ = ["OptimizerStep"]

#: called in every step
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


class OptimizerStep:
    """Trains on batches.

    Args:
        context: whose parts are used.
    """

    def __init__(self, context: FitContext) -> None:
        self.context, self.loader = context, context.loaders.training
        self.module = context.module
        self._options = context.options
        self.window = context.options.accumulate_grad_batches
        self._has_several = len(context.optimizers) > 1
        self._inject_fault = context.fault_injector()
        self._hooks = {name: context.hooks.bound(name) for name in _HOOKS}
        self._end = _step_end(context)
        self._check_pending = len(context.optimizers) == 1
        self._lanes = None if context.lanes is None else LaneScope(context, "train")
        strategy = context.strategy
        self._runs_backward = strategy if isinstance(strategy, RunsBackward) else None
        self._runs_lanes = strategy if isinstance(strategy, RunsLanes) else None
        self._backward_sync = strategy if isinstance(strategy, BackwardSync) else None
        self._loss_now: Tensor | None = None  # of the batch in hand
        self._again = False  # whether a closure evaluates a batch not for the first time
        #: whether the batch that was trained on last ended with a step
        self.stepped = False
        self.losses = Losses(context)
        skips = context.options.on_nan == "skip" and context.finite_losses.needed
        self._nonfinite_guard = NonFiniteGuard(context) if skips else None
        #: parts of a step that the module does itself
        self._own = {name: hook for name in STEP_HOOKS if (hook := own_hook(self.module, name)) is not None}

    def closes_window(self, index: int) -> bool:
        """Return whether the optimizers step after batch `index` of the epoch."""
        return (index + 1) % self.window == 0 or self.loader.at_end

    def train(self, batch: Any, index: int) -> Any:
        """Run the training step on `batch`, and the optimizers where a window closes; return the step's outputs."""
        context = self.context
        self.stepped = self.closes_window(index)
        if not self.module.automatic_optimization:
            if self._inject_fault is not None:
                self._inject_fault("forward")
            return context.scope.run(context.step, batch, index, end=self._end)
        outputs: Any = None
        self.losses.begin()
        for number, optimizer in enumerate(context.optimizers):
            if not self._has_several:
                outputs = self._train_one(optimizer, batch, index, ())
                continue
            with self._others_off(optimizer):
                outputs = self._train_one(optimizer, batch, index, (number,))
        if index == 0:
            context.metric_logger.metrics.warn_of_graphs()
        self.losses.end(index, last=self.stepped and context.progress.step + 1 == self._options.max_steps)
        context.precision.update()
        return outputs

    def _train_one(self, optimizer: Optimizer, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Train with one optimizer; where there are several, its `number` among them is the step's last argument."""
        if needs_closure(optimizer):
            return self._step_by_closure(optimizer, batch, index, number)
        outputs = self._gradients(batch, index, number)
        if self.stepped:
            self._step(optimizer)
        return outputs

    def _gradients(self, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Run forward and backward; gradients stay on this rank until the window closes."""
        if self._runs_backward is not None:
            return self._run_schedule(self._runs_backward, batch, index)
        if self._runs_lanes is not None:
            return self._in_lanes(self._runs_lanes, batch, index)
        if self.stepped or self._backward_sync is None:
            return self._forward_backward(batch, index, number)
        with self._backward_sync.no_backward_sync(self.context.step):
            return self._forward_backward(batch, index, number)

    def _forward_backward(self, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        context, guard = self.context, self._nonfinite_guard
        undo = None if guard is None else guard.rollback_point()
        if self._inject_fault is not None:
            self._inject_fault("forward")
        outputs = context.scope.run(context.step, batch, index, *number, end=self._end)
        loss = self._loss_now = self._loss(outputs)
        if loss is None:
            return outputs
        if guard is not None and guard.skip_if_nonfinite(loss, undo):
            self.stepped = self.stepped and guard.close_window()
            return None
        for hook in self._hooks["on_before_backward"]:
            hook(loss)
        if self._inject_fault is not None:
            self._inject_fault("backward")
        self._backward(loss)
        for hook in self._hooks["on_after_backward"]:
            hook()
        return outputs

    def _run_schedule(self, strategy: RunsBackward, batch: Any, index: int) -> Any:
        """Run forward and backward, the micro-batches of `batch` in turn; return their mean loss, where it is made."""
        context, losses = self.context, []

        def loss_of(outputs: Any, micro_batch: Any) -> Tensor:
            context.metric_logger.begin_batch(micro_batch)
            with context.scope.forward():
                loss = self._loss(self._end(outputs, micro_batch))
            assert loss is not None  # on several processes that is refused
            losses.append(loss.detach())
            context.hooks.call("on_before_backward", loss)
            return loss / self.window if self.window > 1 else loss

        context.inject_fault("forward")
        with context.metric_logger.recording(), context.scope.micro_batches():
            strategy.train(context.step, batch, index, loss_of)
        context.metric_logger.begin_batch(batch)
        context.inject_fault("backward")
        context.hooks.call("on_after_backward")
        return {"loss": torch.stack(losses).mean()} if losses else None

    def _in_lanes(self, strategy: RunsLanes, batch: dict[int, Any], index: int) -> Any:
        """Run forward and backward of one lane after another; return the mean loss of this rank's."""
        context, scope, losses = self.context, self._lanes, []
        assert scope is not None  # made where the strategy has lanes
        context.inject_fault("forward")
        epoch = context.progress.epoch
        with strategy.batch():
            for lane, lane_batch in batch.items():
                with scope.lane(lane, epoch, index), strategy.lane(lane):
                    loss = self._loss(context.scope.run(context.step, lane_batch, index, end=self._end))
                    assert loss is not None  # as on several processes, that is refused
                    losses.append(loss.detach())
                    context.hooks.call("on_before_backward", loss)
                    self._backward(loss)
        scope.leave(epoch, index)
        context.inject_fault("backward")
        context.hooks.call("on_after_backward")
        self._loss_now = torch.stack(losses).mean()
        return {"loss": self._loss_now}

    def _backward(self, loss: Tensor) -> None:
        context = self.context
        by = self._own.get("backward", Tensor.backward)
        context.precision.backward(loss / self.window if self.window > 1 else loss, by)

    def _loss(self, outputs: Any) -> Tensor | None:
        loss = self.losses.read(outputs)
        if loss is not None and self._nonfinite_guard is None and not self._again:
            self.context.finite_losses.check(loss)
        return loss

    def _step(self, optimizer: Optimizer) -> None:
        context = self.context
        context.strategy.reduce_gradients(self.module.parameters())
        if self._inject_fault is not None:
            self._inject_fault("optimizer_step")
        if self._check_pending:
            self._first_step(optimizer)
        context.precision.unscale(optimizer)
        self._clip(optimizer)
        for hook in self._hooks["on_before_optimizer_step"]:
            hook(optimizer)
        if (step := self._own.get("optimizer_step")) is None:
            context.precision.step(optimizer)
        else:  # the batch is computed by now: what its closure returns is there
            step(context.progress.epoch, context.progress.batch, optimizer, lambda: self._loss_now)
        self._zero_gradients(optimizer)

    def _zero_gradients(self, optimizer: Optimizer) -> None:
        for hook in self._hooks["on_before_zero_grad"]:
            hook(optimizer)
        if (zero_grad := self._own.get("optimizer_zero_grad")) is None:
            optimizer.zero_grad()
        else:
            progress = self.context.progress
            zero_grad(progress.epoch, progress.batch, optimizer)

    def _first_step(self, optimizer: Optimizer) -> None:
        """Look once whether the loss reaches anything that is trained."""
        if self.losses.had_one:
            self._check_pending = False
            check_gradients(optimizer, self.module)

    def _clip(self, optimizer: Optimizer) -> None:
        largest, algorithm = self._options.gradient_clip_val, self._options.gradient_clip_algorithm
        if (clip := self._own.get("configure_gradient_clipping")) is not None:
            clip(optimizer, largest, algorithm)
        elif largest is not None:
            self.context.trainer.clip_gradients(optimizer, largest, algorithm)

    def _step_by_closure(self, optimizer: Optimizer, batch: Any, index: int, extra: tuple[int, ...]) -> Any:
        """Have the optimizer evaluate `batch` as often as it wants; what the first time logs is what counts."""
        context = self.context
        first: list[Any] = []

        def closure() -> float:
            optimizer.zero_grad()
            self._again = bool(first)
            with context.metric_logger.muted() if self._again else nullcontext():
                outputs = self._gradients(batch, index, extra)
            if (loss := self.losses.read(outputs)) is None:
                raise NoLoss(f"{type(optimizer).__name__} needs a loss for every batch, and batch {index} has none.")
            first.append(outputs)
            context.strategy.reduce_gradients(self.module.parameters())
            self._clip(optimizer)
            context.hooks.call("on_before_optimizer_step", optimizer)
            return mean_loss(loss, context.collective)

        context.inject_fault("optimizer_step")
        try:
            if (step := self._own.get("optimizer_step")) is None:
                optimizer.step(closure)
            else:
                step(context.progress.epoch, context.progress.batch, optimizer, closure)
        finally:
            self._again = False
        if not first:
            kind = type(optimizer).__name__
            raise UserError(
                f"{type(self.module).__name__}.optimizer_step never called its closure, in which {kind} evaluates a "
                f"batch: nothing was computed for batch {index}. Call optimizer.step(optimizer_closure) there."
            )
        self._zero_gradients(optimizer)
        return first[0]

    @contextmanager
    def _others_off(self, optimizer: Optimizer) -> Iterator[None]:
        """Let only the parameters of `optimizer` collect gradients."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [p for p in self.module.parameters() if id(p) not in mine and p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def step_schedulers(self, interval: Literal["epoch", "step"], count: int) -> None:
        """Step the schedulers of `interval` that are due after `count` of them."""
        if not self.module.automatic_optimization:
            return
        step = self._own.get("lr_scheduler_step")
        for config in self.context.schedulers:
            if config.interval == interval and config.due(count):
                config.step(self.context.metric_logger.values, step)


def _step_end(context: FitContext) -> Callable[[Any, Any], Any]:
    """Return `training_step_end`, and one loss for all chunks of a batch where the strategy makes several."""
    end, strategy = bind_step_end(context.module, "training_step"), context.strategy
    if not isinstance(strategy, MergesOutputs):
        return end
    merge = strategy.merge_outputs
    return lambda outputs, batch: merge(end(outputs, batch))
