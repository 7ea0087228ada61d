"""How a batch becomes part of a step: forward, backward, accumulation, clipping, the optimizers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from midstride.engine.data.feed import Feed
from midstride.engine.errors import LossNotFinite, UserError
from midstride.engine.hooks import step_end
from midstride.engine.leaving_out import LeavingOut

if TYPE_CHECKING:
    from midstride.engine.trainer import Trainer

__all__ = ["Optimization"]


class Optimization:
    """Trains on batches.

    Args:
        trainer: whose parts are used.
        feed: what is trained on; the last batch of an epoch closes a window that is not full.
    """

    def __init__(self, trainer: "Trainer", feed: Feed) -> None:
        self.trainer, self.feed = trainer, feed
        self.module = trainer.module
        self.window = trainer.options.accumulate_grad_batches
        self._several = len(trainer.optimizers) > 1
        self._forward_only = nullcontext[None]()
        self._end = step_end(self.module, "training_step")
        #: whether the batch that was trained on last ended with a step
        self.stepped = False
        # A float16 loss may overflow: the scaler then skips the step.
        self._check_loss = trainer.precision.name != "16"
        self._leaves_out = LeavingOut(trainer) if trainer.options.on_nan == "skip" and self._check_loss else None

    def closes_window(self, index: int) -> bool:
        """Return whether the optimizers step after batch `index` of the epoch."""
        return (index + 1) % self.window == 0 or self.feed.at_end

    def train(self, batch: Any, index: int) -> Any:
        """Run the training step on `batch`, and the optimizers where a window closes; return the step's outputs."""
        trainer = self.trainer
        self.stepped = self.closes_window(index)
        if not self.module.automatic_optimization:
            trainer.strike("forward")
            with trainer.precision.forward():
                return self._ended(trainer.wrapped(batch, index), batch)
        outputs: Any = None
        for number, optimizer in enumerate(trainer.optimizers):
            with self._only(optimizer):
                outputs = self._gradients(batch, index, (number,) if self._several else ())
                if self.stepped:
                    self._step(optimizer)
        trainer.precision.update()
        return outputs

    def _gradients(self, batch: Any, index: int, extra: tuple[int, ...]) -> Any:
        """Run forward and backward; gradients stay on this rank until the window closes."""
        trainer = self.trainer
        if trainer.strategy.schedules:
            return self._scheduled(batch, index)
        undo = self._leaves_out.mark() if self._leaves_out is not None else None
        with self._forward_only if self.stepped else trainer.strategy.accumulate(trainer.wrapped):
            trainer.strike("forward")
            with trainer.precision.forward():
                outputs = self._ended(trainer.wrapped(batch, index, *extra), batch)
            loss = self._loss(outputs)
            if loss is None:
                return outputs
            if self._leaves_out is not None and self._leaves_out.is_bad(loss, undo):
                self.stepped = self.stepped and self._leaves_out.close_window()
                return None
            trainer.hooks.call("on_before_backward", loss)
            trainer.strike("backward")
            trainer.precision.backward(loss / self.window if self.window > 1 else loss)
            trainer.hooks.call("on_after_backward")
        return outputs

    def _scheduled(self, batch: Any, index: int) -> Any:
        """Run forward and backward, the parts of `batch` taking turns; return their mean loss, where it is made."""
        trainer, losses = self.trainer, []

        def loss_of(outputs: Any, part: Any) -> Tensor:
            trainer.logged.batch = part
            with trainer.precision.forward():
                loss = self._loss(self._end(outputs, part))
            assert loss is not None  # on several processes that is refused
            losses.append(loss.detach())
            trainer.hooks.call("on_before_backward", loss)
            return loss / self.window if self.window > 1 else loss

        trainer.strike("forward")
        with trainer.logged.heard(), trainer.logged.parts():
            trainer.strategy.train(trainer.wrapped, batch, index, loss_of)
        trainer.logged.batch = batch
        trainer.strike("backward")
        trainer.hooks.call("on_after_backward")
        return {"loss": torch.stack(losses).mean()} if losses else None

    def _ended(self, outputs: Any, batch: Any) -> Any:
        return self.trainer.strategy.joined(self._end(outputs, batch))

    def _loss(self, outputs: Any) -> Tensor | None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        name = f"{type(self.module).__name__}.training_step"
        if loss is None:
            if self.trainer.world.size > 1:
                raise UserError(
                    f"{name} returned no loss: on {self.trainer.world.size} processes a batch cannot be skipped by "
                    "one of them. Return a loss of 0.0 that depends on the parameters instead."
                )
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f'{name} returned {what}; a tensor of one number is needed, or a dict with it as "loss".')
        if self._leaves_out is None:
            self.check_finite(loss)
        return loss

    def check_finite(self, loss: Tensor) -> None:
        """Refuse to go on from a loss that is not finite.

        Raises:
            LossNotFinite: saying where. On a GPU it waits for the device, as a loss that is logged does.
        """
        if self._check_loss and not math.isfinite(loss.item()):
            progress = self.trainer.progress
            raise LossNotFinite(
                f"the loss is {loss.item()} at epoch {progress.epoch}, batch {progress.batch}, step {progress.step + 1}"
                f" on rank {self.trainer.world.rank}. Nothing was written after it: earlier snapshots are good."
            )

    def _step(self, optimizer: Optimizer) -> None:
        trainer, options = self.trainer, self.trainer.options
        trainer.strategy.reduce_gradients(self.module.parameters())
        trainer.strike("optimizer_step")
        trainer.precision.unscale(optimizer)
        if options.gradient_clip_val is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip = trainer.strategy.clip if options.gradient_clip_algorithm == "norm" else clip_grad_value_
            clip(parameters, options.gradient_clip_val)
        trainer.hooks.call("on_before_optimizer_step", optimizer)
        trainer.precision.step(optimizer)
        trainer.hooks.call("on_before_zero_grad", optimizer)
        optimizer.zero_grad()

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
        for config in self.trainer.schedulers:
            if config.interval == interval and config.due(count):
                config.step(self.trainer.logged.values)
