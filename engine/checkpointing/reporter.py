"""Reporter: sends events to the launcher, or without one shows them on the terminal."""

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from midstride.engine.config.options import TrainerOptions
from midstride.engine.metrics.logger import MetricLogger
from midstride.engine.modules.progress import Progress
from midstride.engine.session.events import Event, EventLog
from midstride.engine.session.session import Session
from midstride.engine.strategies.step import loss_in
from midstride.engine.world import World

if TYPE_CHECKING:
    from midstride.engine.session.terminal_view import TerminalView

__all__ = ["Reporter"]

_LOG = logging.getLogger("midstride")
#: seconds between two "step" events
PERIOD_S = 0.5
#: seconds between two "waiting" events with the same reason
WAITS_PERIOD_S = 1.0


class Reporter:
    """Writes rank 0's events to the session, or shows them as a progress bar.

    Args:
        world: world of this rank.
        bar: whether to show a progress bar, on a terminal and without a launcher.
    """

    def __init__(self, world: World, *, bar: bool) -> None:
        session = Session.from_environment()
        self._rank = world.rank
        self._rank_log = EventLog(session.events) if session else None  # on every rank
        self._log = self._rank_log if world.is_first else None
        self._view: TerminalView | None = None
        self._bar = bar and session is None and world.is_first and sys.stdout.isatty()
        self._first = world.is_first
        #: whether steps are written or shown
        self.shows_steps = self._log is not None or self._bar
        self._next_s = 0.0
        self._waits_next_s: dict[str, float] = {}
        self._from = (0.0, 0)
        self._steps: int | None = None

    def begin(self, progress: Progress, batches: int | None, options: TrainerOptions, generation: int | None) -> None:
        """Report the start of training at `progress`, and the total number of steps if it is known."""
        self.expect(progress, batches, options)
        self._from = (time.monotonic(), progress.step)
        if self._bar:
            from midstride.engine.session.terminal_view import TerminalView

            self._view = TerminalView().__enter__()
        self.emit("started", step=progress.step, epoch=progress.epoch, steps_total=self._steps, generation=generation)

    def expect(self, progress: Progress, batches: int | None, options: TrainerOptions) -> None:
        """Set the total number of steps; the current and later epochs have `batches` batches."""
        ends = [options.max_steps] if options.max_steps else []
        if options.max_epochs and batches is not None:
            steps = -(-batches // options.accumulate_grad_batches)
            left = (options.max_epochs - progress.epoch) * steps - progress.batch // options.accumulate_grad_batches
            ends.append(progress.step + left)
        self._steps = min(ends, default=None)

    def step(self, progress: Progress, batches: int | None, outputs: Any, metric_logger: MetricLogger) -> None:
        """Report a step, unless one was reported less than `PERIOD_S` ago."""
        now_s = time.monotonic()
        # The first step is always reported: it ends a restart.
        if now_s < self._next_s:
            return
        self._next_s = now_s + PERIOD_S
        loss = loss_in(outputs)
        began_s, began = self._from
        self.emit(
            "step",
            epoch=progress.epoch,
            batch=progress.batch,
            batches=batches,
            step=progress.step,
            steps_total=self._steps,
            loss=float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else None,
            metrics=metric_logger.progress_bar_values(),
            rate=(progress.step - began) / max(now_s - began_s, 1e-9),
        )

    def emit(self, kind: str, **fields: Any) -> None:
        """Report another event on rank 0."""
        if self._log is not None:
            self._log.emit(kind, **fields)
        if self._view is not None:
            self._view.event(Event(kind, time.time(), fields))

    def resumed(self, generation: int, resumed_from: str, step: int) -> None:
        """Report the snapshot that this attempt resumes from; without a launcher, log a line."""
        if self._log is None:
            self.announce(f"generation {generation} resumes from snapshot {resumed_from}, step {step}")
        self.emit("resumed", generation=generation, resumed_from=resumed_from, step=step)

    def store_waits(self, waited_s: float, why: str) -> None:
        """Report a wait for the store, at most once a second for each reason.

        Called on any rank and in any thread.
        """
        now_s = time.monotonic()
        # With one limit for all reasons, the events of training, once a second, would suppress the store's errors.
        if self._rank_log is not None and now_s >= self._waits_next_s.get(why, 0.0):
            self._waits_next_s[why] = now_s + WAITS_PERIOD_S
            self._rank_log.emit("waiting", rank=self._rank, waited_s=waited_s, why=why)

    def announce(self, line: str) -> None:
        """Log a line on rank 0; if logging is not configured, write it to the console."""
        if not self._first:
            return
        if not (logging.root.handlers or _LOG.handlers):
            _LOG.addHandler(logging.StreamHandler())
            _LOG.setLevel(logging.INFO)
        _LOG.info("%s", line)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._view is not None:
            self._view.__exit__(None, None, None)
            self._view = None
