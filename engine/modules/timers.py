"""Callbacks with a clock: one ends the training after a time, one measures how fast it is."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from midstride.engine.errors import UserError
from midstride.engine.modules.callbacks import Callback
from midstride.engine.session.ending import Ending, EndReason

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface
    from midstride.engine.modules.module import TrainingModule

__all__ = ["Throughput", "Timer"]

log = logging.getLogger(__name__)


class Timer(Callback):
    """Ends the training after `seconds`, counted over all attempts up to each snapshot.

    The clock of rank 0 decides. `min_epochs` and `min_steps` are trained first. A fit with more time continues.

    Args:
        seconds: time in training and validation.
        interval: "step" looks at the clock after each batch, "epoch" after each epoch.
    """

    def __init__(self, seconds: float, interval: str = "step") -> None:
        if interval not in ("step", "epoch"):
            raise UserError(f"Timer: interval should be step or epoch, not {interval!r}")
        self.seconds, self.interval = seconds, interval
        #: seconds in training, when rank 0 last looked at its clock
        self.elapsed = 0.0
        self._earlier, self._start = 0.0, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.elapsed >= self.seconds

    def on_train_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Start the clock of this attempt."""
        self._earlier, self._start = 0.0, time.monotonic()

    def on_train_batch_end(
        self, trainer: "TrainerInterface", module: "TrainingModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the training if the time is over."""
        if self.interval == "step":
            self._look(trainer)

    def on_train_epoch_end(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """End the training if the time is over."""
        self._look(trainer)

    def _look(self, trainer: "TrainerInterface") -> None:
        now = self._earlier + time.monotonic() - self._start
        self.elapsed = trainer.gather(now)[0]
        if self.is_over:
            trainer.stop(Ending(EndReason.MAX_TIME, f"max_time {timedelta(seconds=self.seconds)} is over"))

    def state_dict(self) -> dict[str, Any]:
        """Return the time in training."""
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Continue from an earlier attempt's time."""
        self.elapsed = self._earlier = state_dict["elapsed"]
        self._start = time.monotonic()


class Throughput(Callback):
    """Measures samples and tokens a second over all ranks, and the utilization of the hardware.

    Its values are attributes and lines of the log. They are in no snapshot and in no row, as those are the same in
    each attempt.

    Args:
        every_steps: optimizer steps between two measurements.
        tokens: returns the number of tokens in a batch.
        flops: floating-point operations for a sample, forward and backward.
        peak_flops: operations a second of one device at its best.
    """

    def __init__(
        self,
        every_steps: int = 50,
        tokens: Callable[[Any], int] | None = None,
        flops: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if type(every_steps) is not int or every_steps < 1:
            raise UserError(f"Throughput: every_steps should be a whole number from 1 on, not {every_steps!r}")
        if (flops is None) != (peak_flops is None):
            raise UserError("Throughput: utilization needs both flops and peak_flops")
        self.every_steps, self._tokens, self._flops, self._peak_flops = every_steps, tokens, flops, peak_flops
        self.samples_per_s = self.tokens_per_s = self.utilization = 0.0
        self._counted = self._counted_tokens = self._measured_at = 0
        self._since = time.monotonic()

    def on_train_start(self, trainer: "TrainerInterface", module: "TrainingModule") -> None:
        """Start to count."""
        self._begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: "TrainerInterface", module: "TrainingModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and measure every few steps."""
        self._counted += trainer.metric_logger.samples() * trainer.world_size
        self._counted_tokens += 0 if self._tokens is None else self._tokens(batch) * trainer.world_size
        if trainer.global_step - self._measured_at >= self.every_steps:
            self._measure(trainer)

    def _measure(self, trainer: "TrainerInterface") -> None:
        seconds = max(time.monotonic() - self._since, 1e-9)
        self.samples_per_s, self.tokens_per_s = self._counted / seconds, self._counted_tokens / seconds
        line = f"{self.samples_per_s:,.1f} samples/s"
        if self._tokens is not None:
            line += f", {self.tokens_per_s:,.1f} tokens/s"
        if self._flops is not None and self._peak_flops is not None:
            self.utilization = self.samples_per_s * self._flops / (self._peak_flops * trainer.world_size)
            line += f", {self.utilization:.1%} of the peak"
        if trainer.is_global_zero:
            log.info("step %s: %s", trainer.global_step, line)
        self._begin(trainer.global_step)

    def _begin(self, step: int) -> None:
        self._counted, self._counted_tokens, self._measured_at, self._since = 0, 0, step, time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: each attempt measures its own speed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Start over."""
