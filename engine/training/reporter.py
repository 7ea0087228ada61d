"""The reporter: tells the launcher what happens; where there is none, the person at the terminal."""

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
#: seconds between two step events
PERIOD_S = 0.5
#: and between two that say, for one reason, that the store is waited for
WAITS_PERIOD_S = 1.0


class Reporter:
    """Writes rank 0's events to the session, or shows them as a bar; with neither it costs a comparison a step.

    Args:
        world: only rank 0 speaks.
        bar: whether a progress bar is wanted, on a terminal and without a launcher.
    """

    def __init__(self, world: World, *, bar: bool) -> None:
        session = Session.from_environment()
        self._rank = world.rank
        self._own = EventLog(session.events) if session else None  # of every rank
        self._log = self._own if world.is_first else None
        self._view: TerminalView | None = None
        self._bar = bar and session is None and world.is_first and sys.stdout.isatty()
        self._first = world.is_first
        #: whether anybody sees the steps
        self.shows_steps = self._log is not None or self._bar
        self._next_s = 0.0
        self._waits_next_s: dict[str, float] = {}
        self._from = (0.0, 0)
        self._steps: int | None = None

    def begin(self, progress: Progress, batches: int | None, options: TrainerOptions, generation: int | None) -> None:
        """Tell that training starts, from wherever `progress` stands, and how many steps it will take."""
        ends = [options.max_steps] if options.max_steps else []
        if options.max_epochs and batches is not None:
            ends.append(options.max_epochs * -(-batches // options.accumulate_grad_batches))
        self._steps = min(ends, default=None)
        self._from = (time.monotonic(), progress.step)
        if self._bar:
            from midstride.engine.session.terminal_view import TerminalView

            self._view = TerminalView().__enter__()
        self.emit("started", step=progress.step, epoch=progress.epoch, steps_total=self._steps, generation=generation)

    def step(self, progress: Progress, batches: int | None, outputs: Any, metric_logger: MetricLogger) -> None:
        """Tell about a step, if the last telling was long enough ago."""
        now_s = time.monotonic()
        # The first step is always told: it ends a restart.
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
        """Tell about anything else."""
        if self._log is not None:
            self._log.emit(kind, **fields)
        if self._view is not None:
            self._view.event(Event(kind, time.time(), fields))

    def store_waits(self, waited_s: float, why: str) -> None:
        """Tell, on any rank and from any thread, that the store is waited for; once a second for each reason."""
        now_s = time.monotonic()
        # One limit for all reasons would let training, which looks every second, leave out what the store answers.
        if self._own is not None and now_s >= self._waits_next_s.get(why, 0.0):
            self._waits_next_s[why] = now_s + WAITS_PERIOD_S
            self._own.emit("waiting", rank=self._rank, waited_s=waited_s, why=why)

    def announce(self, line: str) -> None:
        """Say something once to the user who started the run: on the console, unless logging goes elsewhere."""
        if not self._first:
            return
        if not (logging.root.handlers or _LOG.handlers):
            _LOG.addHandler(logging.StreamHandler())
            _LOG.setLevel(logging.INFO)
        _LOG.info("%s", line)

    def close(self) -> None:
        """Take the bar away."""
        if self._view is not None:
            self._view.__exit__(None, None, None)
            self._view = None
