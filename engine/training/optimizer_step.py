"""Trains on one batch: forward and backward, then clipping and the optimizer step at the end of a window."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer

from midstride.engine.errors import NoLoss, UserError
from midstride.engine.strategies.mixins import parameter_check
from midstride.engine.training.closures import (
    closure_faults,
    closure_returning,
    mean_loss,
    needs_closure,
    step_without_closure,
)
from midstride.engine.training.context import FitContext
from midstride.engine.training.fit_warnings import check_gradients
from midstride.engine.training.forward_backward import ForwardBackward
from midstride.engine.training.step_calls import StepCalls
from midstride.engine.user_code import call_user_code

__all__ = ["OptimizerStep"]


class OptimizerStep:
    """Trains on batches. The constructor decides once what each step consists of, so that steps are cheap.

    Args:
        context: context of the fit.
    """

    def __init__(self, context: FitContext) -> None:
        self.context, self.loader, self.module = context, context.loaders.training, context.module
        self._options = context.options
        self.window = context.options.accumulate_grad_batches
        self._needs_closure: dict[type[Optimizer], bool] = {}
        self._calls = StepCalls(context)
        self._forward_backward = ForwardBackward(context, self._calls)
        self._take_step, self._check_parameters = self._optimizer_step(), parameter_check(context.strategy)
        self._check_pending = len(context.optimizers) == 1 and context.progress.step == 0
        self._with_gradients: list[Optimizer] = []  # stepped, and gradients not zeroed yet

    @property
    def stepped(self) -> bool:
        """Whether the last batch ended with an optimizer step."""
        return self._forward_backward.ends_window

    def closes_window(self, batches: int) -> bool:
        """Return whether a window of accumulation ends with this number of batches of the epoch."""
        return batches % self.window == 0 or self.loader.at_end

    def train(self, batch: Any, index: int) -> Any:
        """Run the training step on `batch`, and the optimizers at the end of a window; return the step's outputs."""
        context, forward_backward = self.context, self._forward_backward
        forward_backward.begin_batch(ends_window=self.closes_window(index + 1))
        if not self.module.automatic_optimization:
            return forward_backward.forward(batch, index, ())
        outputs: Any = None
        for number, optimizer in enumerate(context.optimizers):
            if len(context.optimizers) == 1:
                outputs = self._train_one(optimizer, batch, index, ())
                continue
            self.zero_grad()  # an optimizer before may have the same parameters
            with self._toggled(optimizer):
                outputs = self._train_one(optimizer, batch, index, (number,))
        if index == 0:
            context.metric_logger.metrics.warn_of_graphs()
        if not forward_backward.had_loss:
            is_last = forward_backward.ends_window and context.progress.step + 1 == self._options.max_steps
            forward_backward.losses.record_missing(index, last=is_last)
        if context.precision.scales:
            context.precision.update()
        return outputs

    def _train_one(self, optimizer: Optimizer, batch: Any, index: int, number: tuple[int, ...]) -> Any:
        """Train with one optimizer; with several, its `number` is the last argument of the step."""
        if self._check_parameters is not None:
            self._check_parameters(optimizer, self.module)
        by_closure = self._needs_closure.get(type(optimizer))
        if self._check_class(optimizer) if by_closure is None else by_closure:
            return self._step_by_closure(optimizer, batch, index, number)
        forward_backward = self._forward_backward
        outputs = forward_backward.run(batch, index, number)
        if forward_backward.ends_window:
            self._step(optimizer)
        return outputs

    def _check_class(self, optimizer: Optimizer) -> bool:
        """Return whether optimizers of this class need a closure.

        Raises:
            UserError: they do, and the options or the strategy exclude it; the optimizer was replaced after the start.
        """
        needed = self._needs_closure[type(optimizer)] = needs_closure(optimizer)
        if faults := closure_faults([optimizer], self._options, self.context.strategy):
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

    def zero_grad(self) -> None:
        """Zero the gradients of stepped optimizers; called after `on_train_batch_end`, so that it can read them."""
        while self._with_gradients:
            optimizer = self._with_gradients.pop(0)
            for call in self._calls.zero_grad:
                call(optimizer)

    def _optimizer_step(self) -> Callable[[Optimizer], object]:
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
        """Step an optimizer whose closure evaluates `batch`; only values logged by the first evaluation are kept."""
        context, forward_backward = self.context, self._forward_backward
        first: list[Any] = []

        def closure() -> float:
            optimizer.zero_grad()
            with forward_backward.reevaluating() if first else nullcontext():
                outputs = forward_backward.run(batch, index, extra)
            if (loss := forward_backward.losses.read(outputs)) is None:
                raise NoLoss(f"{type(optimizer).__name__} needs a loss for every batch, and batch {index} has none.")
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
                f"{type(self.module).__name__}.optimizer_step never called its closure, in which {kind} evaluates a "
                f"batch: nothing was computed for batch {index}. Call optimizer.step(optimizer_closure) there."
            )
        self._with_gradients.append(optimizer)
        return first[0]

    @contextmanager
    def _toggled(self, optimizer: Optimizer) -> Iterator[None]:
        """Let only the parameters of `optimizer` collect gradients in the block."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [p for p in self.module.parameters() if id(p) not in mine and p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def step_schedulers(self, interval: Literal["epoch", "step"], count: int, *, watching: bool) -> None:
        """Step the schedulers of `interval` that are due after `count` epochs, or batches of an epoch.

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
