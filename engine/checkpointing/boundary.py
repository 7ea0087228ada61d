"""Boundary between two batches, where a run's state is complete.

Takes due snapshots and handles requests.
"""

from typing import Any

from midstride.engine.checkpointing.checkpointer import Checkpointer
from midstride.engine.checkpointing.context import RunContext
from midstride.engine.errors import StopRequested
from midstride.engine.session.requests import Request, RequestKind
from midstride.engine.strategies.mixins import LazyDevice

__all__ = ["StepBoundary"]


class StepBoundary:
    """Takes snapshots and handles requests between the batches of one fit, evaluation or loop.

    Args:
        context: context of the call.
        checkpointer: takes the snapshots; None if no snapshots are taken.
    """

    def __init__(self, context: RunContext, checkpointer: Checkpointer | None) -> None:
        self._context, self._checkpointer = context, checkpointer
        self._progress, self._metric_logger = context.progress, context.metric_logger
        self._rows = self._metric_logger.rows
        self._heartbeat, self._requests, self._reporter = context.heartbeat, context.requests, context.reporter
        self._faults = context.faults_at("after_step")
        self._lazy = context.strategy if isinstance(context.strategy, LazyDevice) else None

    def after_step(self, batches: int | None, outputs: Any) -> None:
        """Write the row of a step to the metric log, report the step, and call `after_batch`.

        Args:
            batches: number of batches in the epoch; None if it is unknown.
            outputs: outputs of the training step.
        """
        self.write_row(batches, outputs)
        self.after_batch()

    def write_row(self, batches: int | None, outputs: Any = None) -> None:
        """Write a step's row to the metric log, and report the step; arguments as of `after_step`."""
        self._rows.step(self._progress.epoch, self._progress.step)
        if self._reporter.shows_steps:
            self._reporter.step(self._progress, batches, outputs, self._metric_logger)
        for fault in self._faults:
            fault()

    def after_batch(self) -> None:
        """Take a snapshot if one is due, and handle a request if there is one."""
        if self._lazy is not None:
            self._lazy.mark_step()
        self._heartbeat.beat(self._progress.step)
        if self._checkpointer is not None:
            self._checkpointer.snapshot_if_due()
        else:
            self._rows.discard()
        if request := self._requests.at_boundary():
            self._handle(request)

    def between_steps(self) -> None:
        """Handle a request without a scheduled snapshot: after a batch without a step, or an epoch."""
        if self._lazy is not None:
            self._lazy.mark_step()
        self._heartbeat.beat(self._progress.step)
        if request := self._requests.at_boundary():
            self._progress.boundary_passed()  # so that its snapshot has a name of its own
            self._handle(request)

    def _handle(self, request: Request) -> None:
        if self._checkpointer is not None:
            self._checkpointer.handle(request)
        elif request.kind is RequestKind.STOP:
            step = self._progress.step
            self._context.collective.gather(None)  # no rank ends while another still exchanges the request
            raise StopRequested(f"asked to stop, after step {step}; no snapshots are taken in this fit")
