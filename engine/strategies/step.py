"""Runs the user's steps: the only file that calls `training_step` and other steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.modules.module import TrainingModule
from midstride.engine.optim.precision import Precision
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.trees import samples_in
from midstride.engine.user_code import fork_count, users_error

__all__ = ["STEPS", "StepName", "StepScope", "TrainingStep", "loss_in"]

StepName = Literal["training_step", "validation_step", "test_step", "predict_step"]
#: stage -> the method of the module that is called for each of its batches
STEPS: dict[str, StepName] = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


def loss_in(outputs: Any) -> Any:
    """Return the loss in a training step's outputs, or their item "loss"; None without one."""
    return outputs.get("loss") if isinstance(outputs, dict) else outputs


@dataclass(frozen=True)
class StepScope:
    """The context in which the user's steps run: autocast, logging and the heartbeat.

    Args:
        metric_logger: receives the values of `self.log`.
        precision: the precision that the module computes in.
        heartbeat: tells the launcher how long user code takes.
    """

    metric_logger: MetricLogger
    precision: Precision
    heartbeat: Heartbeat

    def run(
        self,
        forward: Callable[..., Any],
        batch: Any,
        *arguments: Any,
        end: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Run a step on `batch` under autocast, with `self.log` for it, and return the outputs.

        Args:
            forward: calls the step, through the wrappers of the strategy.
            batch: on this rank's device.
            arguments: further arguments of the step.
            end: the module's `<step>_end`, called with the outputs and the batch; None if there is none.
        """
        if self.metric_logger.is_recording and self.precision.is_plain:  # no context: each costs a call or two
            outputs = forward(batch, *arguments)
            return outputs if end is None else end(outputs, batch)
        with self.metric_logger.recording(), self.forward():
            outputs = forward(batch, *arguments)
            return outputs if end is None else end(outputs, batch)

    def call(self, module: TrainingModule, name: StepName, batch: Any, *arguments: Any) -> Any:
        """Call the method `name` of `module` or a replica on `batch`, and return its outputs.

        Values that it logs are weighted by the samples of `batch`, which can be a micro-batch of the current batch.

        Raises:
            UserCodeError: the method raised.
        """
        logged, step = self.metric_logger, getattr(module, name)
        whole, weight, forks = logged.batch, logged.weight, fork_count()
        if batch is not whole:  # a part of it, or a copy
            logged.begin_batch(batch, weight if samples_in(batch) == samples_in(whole) else None)
        try:
            return step(batch, *arguments)
        except BaseException as error:  # not by call_user_code: each step saves a call, and its traceback a frame
            where = f"{type(module).__name__}.{name}{_given(error, len(arguments))}"
            if (users := users_error(where, error, forks)) is None:
                raise
            raise users from error
        finally:
            if batch is not whole:
                logged.begin_batch(whole, weight)

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward pass: autocast, where the precision has it."""
        return self.precision.forward()

    def micro_batches(self) -> AbstractContextManager[None]:
        """Merge values that micro-batches log in the block into one per step; means by samples."""
        return self.metric_logger.micro_batches()

    def muted(self) -> AbstractContextManager[None]:
        """Drop values logged in the block, and updates of metrics."""
        return self.metric_logger.muted()

    def mute(self) -> None:
        """Drop the values of this rank from now on, because another rank has the outputs."""
        self.metric_logger.mute()


class TrainingStep(nn.Module):
    """The module that a strategy wraps; its forward is the user's training step.

    Args:
        module: the user's module.
        scope: the context in which its step runs.
        call: the strategy's call of the step, from `Strategy.step_call`.
    """

    def __init__(self, module: TrainingModule, scope: StepScope, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._call, self._heartbeat = call, scope.heartbeat

    def forward(self, *args: Any) -> Any:
        """Return the outputs of the user's `training_step`."""
        heartbeat = self._heartbeat
        heartbeat.begin_work()
        outputs = self._call(*args)
        heartbeat.end_work()
        return outputs


def _given(error: BaseException, arguments: int) -> str:
    """Return the arguments of a step, if `error` says that it does not take them."""
    if not isinstance(error, TypeError) or error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return ""
    return f" (called with {', '.join(('batch', 'batch_idx', 'dataloader_idx')[: 1 + arguments])})"
