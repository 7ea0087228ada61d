"""How a batch becomes part of a step: forward, backward, accumulation, clipping, the optimizers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from midstride.engine.errors import NoLoss
from midstride.engine.modules.hooks import step_end
from midstride.engine.training.closures import mean_loss, needs_closure
from midstride.engine.training.context import FitContext
from midstride.engine.training.losses import Losses, check_finite, must_be_finite
from midstride.engine.training.nonfinite import LeavingOut
from midstride.engine.training.unused import check_gradients

__all__ = ["Optimization"]


class Optimization:
    """Trains on batches.

    Args:
        context: whose parts are used.
    """

    def __init__(self, context: FitContext) -> None:
        self.context, self.feed = context, context.feeds.training
        self.module = context.module
        self.window = context.options.accumulate_grad_batches
        self._several = len(context.optimizers) > 1
        self._forward_only = nullcontext[None]()
        self._end = step_end(self.module, "training_step")
        self._looks = len(context.optimizers) == 1
        self._again = False  # whether a closure evaluates a batch not for the first time
        #: whether the batch that was trained on last ended with a step
        self.stepped = False
        self.losses = Losses(context)
        skips = context.options.on_nan == "skip" and must_be_finite(context)
        self._leaves_out = LeavingOut(context) if skips else None

    def closes_window(self, index: int) -> bool:
        """Return whether the optimizers step after batch `index` of the epoch."""
        return (index + 1) % self.window == 0 or self.feed.at_end

    def train(self, batch: Any, index: int) -> Any:
        """Run the training step on `batch`, and the optimizers where a window closes; return the step's outputs."""
        context = self.context
        self.stepped = self.closes_window(index)
        if not self.module.automatic_optimization:
            context.inject_fault("forward")
            with context.precision.forward():
                return self._ended(context.step(batch, index), batch)
        outputs: Any = None
        self.losses.begin()
        for number, optimizer in enumerate(context.optimizers):
            extra = (number,) if self._several else ()
            with self._only(optimizer):
                if needs_closure(optimizer):
                    outputs = self._step_by_closure(optimizer, batch, index, extra)
                    continue
                outputs = self._gradients(batch, index, extra)
                if self.stepped:
                    self._step(optimizer)
        if index == 0:
            context.logged.metrics.look_for_graphs()
        self.losses.end(index, last=self.stepped and context.progress.step + 1 == context.options.max_steps)
        context.precision.update()
        return outputs

    def _gradients(self, batch: Any, index: int, extra: tuple[int, ...]) -> Any:
        """Run forward and backward; gradients stay on this rank until the window closes."""
        context = self.context
        if context.strategy.schedules:
            return self._scheduled(batch, index)
        undo = self._leaves_out.mark() if self._leaves_out is not None else None
        with self._forward_only if self.stepped else context.strategy.accumulate(context.step):
            context.inject_fault("forward")
            with context.precision.forward():
                outputs = self._ended(context.step(batch, index, *extra), batch)
            loss = self._loss(outputs)
            if loss is None:
                return outputs
            if self._leaves_out is not None and self._leaves_out.is_bad(loss, undo):
                self.stepped = self.stepped and self._leaves_out.close_window()
                return None
            context.hooks.call("on_before_backward", loss)
            context.inject_fault("backward")
            context.precision.backward(loss / self.window if self.window > 1 else loss)
            context.hooks.call("on_after_backward")
        return outputs

    def _scheduled(self, batch: Any, index: int) -> Any:
        """Run forward and backward, the parts of `batch` taking turns; return their mean loss, where it is made."""
        context, losses = self.context, []

        def loss_of(outputs: Any, part: Any) -> Tensor:
            context.logged.begin_batch(part)
            with context.precision.forward():
                loss = self._loss(self._end(outputs, part))
            assert loss is not None  # on several processes that is refused
            losses.append(loss.detach())
            context.hooks.call("on_before_backward", loss)
            return loss / self.window if self.window > 1 else loss

        context.inject_fault("forward")
        with context.logged.heard(), context.logged.parts():
            context.strategy.train(context.step, batch, index, loss_of)
        context.logged.begin_batch(batch)
        context.inject_fault("backward")
        context.hooks.call("on_after_backward")
        return {"loss": torch.stack(losses).mean()} if losses else None

    def _ended(self, outputs: Any, batch: Any) -> Any:
        return self.context.strategy.joined(self._end(outputs, batch))

    def _loss(self, outputs: Any) -> Tensor | None:
        loss = self.losses.read(outputs)
        if loss is not None and self._leaves_out is None and not self._again:
            check_finite(loss, self.context)
        return loss

    def _step(self, optimizer: Optimizer) -> None:
        context = self.context
        context.strategy.reduce_gradients(self.module.parameters())
        context.inject_fault("optimizer_step")
        self._first_step(optimizer)
        context.precision.unscale(optimizer)
        self._clip(optimizer)
        context.hooks.call("on_before_optimizer_step", optimizer)
        context.precision.step(optimizer)
        context.hooks.call("on_before_zero_grad", optimizer)
        optimizer.zero_grad()

    def _first_step(self, optimizer: Optimizer) -> None:
        """Look once whether the loss reaches anything that is trained."""
        if self._looks and self.losses.had_one:
            self._looks = False
            check_gradients(optimizer, self.module)

    def _clip(self, optimizer: Optimizer) -> None:
        options = self.context.options
        if options.gradient_clip_val is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip = self.context.strategy.clip if options.gradient_clip_algorithm == "norm" else clip_grad_value_
            clip(parameters, options.gradient_clip_val)

    def _step_by_closure(self, optimizer: Optimizer, batch: Any, index: int, extra: tuple[int, ...]) -> Any:
        """Have the optimizer evaluate `batch` as often as it wants; what the first time logs is what counts."""
        context = self.context
        first: list[Any] = []

        def closure() -> float:
            optimizer.zero_grad()
            self._again = bool(first)
            with context.logged.unheard() if self._again else self._forward_only:
                outputs = self._gradients(batch, index, extra)
            if (loss := self.losses.read(outputs)) is None:
                raise NoLoss(f"{type(optimizer).__name__} needs a loss for every batch, and batch {index} has none.")
            first.append(outputs)
            context.strategy.reduce_gradients(self.module.parameters())
            self._clip(optimizer)
            context.hooks.call("on_before_optimizer_step", optimizer)
            return mean_loss(loss, context.strategy)

        context.inject_fault("optimizer_step")
        try:
            optimizer.step(closure)
        finally:
            self._again = False
        context.hooks.call("on_before_zero_grad", optimizer)
        optimizer.zero_grad()
        return first[0]

    @contextmanager
    def _others_off(self, optimizer: Optimizer) -> Iterator[None]:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [p for p in self.module.parameters() if id(p) not in mine and p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def _only(self, optimizer: Optimizer) -> Any:
        """Return a context in which only this optimizer's parameters collect gradients."""
        return self._others_off(optimizer) if self._several else self._forward_only

    def step_schedulers(self, interval: Literal["epoch", "step"], count: int) -> None:
        """Step the schedulers of `interval` that are due after `count` of them."""
        if not self.module.automatic_optimization:
            return
        for config in self.context.schedulers:
            if config.interval == interval and config.due(count):
                config.step(self.context.logged.values)
