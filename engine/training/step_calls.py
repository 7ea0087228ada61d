"""The functions that a training batch calls, looked up once in a fit, so that missing hooks cost nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from torch import Tensor

from midstride.engine.modules.hooks import own_hook
from midstride.engine.modules.module import STEP_HOOKS
from midstride.engine.training.context import FitContext

__all__ = ["StepCalls"]

_Calls = Sequence[Callable[..., object]]


class StepCalls:
    """Hooks, injected faults, and parts of a step that the module overrides, in the order of their calls.

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
        """Return a function that runs the backward pass of a loss, divided by the batches of a window."""
        window, by = context.options.accumulate_grad_batches, self.own.get("backward", Tensor.backward)
        run = partial(context.precision.backward, by=by) if context.precision.scales else by
        return run if window == 1 else lambda loss: run(loss / window)

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
