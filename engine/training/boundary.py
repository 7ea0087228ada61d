"""Boundaries: what is done between two batches, where everything that decides what comes next stands in the parts."""

from typing import Any

from midstride.engine.errors import StopRequested
from midstride.engine.session.request import Request, RequestKind
from midstride.engine.training.checkpointing.checkpointer import Recorder
from midstride.engine.training.context import EvaluationContext

__all__ = ["Boundaries"]


class Boundaries:
    """The places of one fit at which a snapshot can be taken, and what was asked from outside is done.

    Args:
        context: whose parts stand there.
        recorder: takes the snapshots; None for a fit that is not kept.
    """

    def __init__(self, context: EvaluationContext, recorder: Recorder | None) -> None:
        self._context, self._recorder = context, recorder
        self._progress, self._rows = context.progress, context.logged.rows
        self._heartbeat, self._requests, self._reporter = context.heartbeat, context.requests, context.reporter
        self._mark_step = context.strategy.mark_step

    def stepped(self, batches: int | None, outputs: Any) -> None:
        """Close a step: its row, its event, and a snapshot if one is due.

        Args:
            batches: of the epoch, as far as is known.
            outputs: of the training step.
        """
        self._rows.step(self._progress.epoch, self._progress.step)
        self._reporter.step(self._progress, batches, outputs)
        self._context.inject_fault("after_step")
        self.reached()

    def reached(self) -> None:
        """Take a snapshot if one is due here, and do what was asked from outside."""
        self._mark_step()
        self._heartbeat.beat(self._progress.step)
        if self._recorder is not None:
            self._recorder.boundary()
        else:
            self._rows.forget()
        if request := self._requests.boundary():
            self._answer(request)

    def in_window(self) -> None:
        """Do what was asked from outside, inside an accumulation window."""
        self._mark_step()
        self._heartbeat.beat(self._progress.step)
        if request := self._requests.boundary():
            self._progress.boundary()  # a place of its own
            self._answer(request)

    def _answer(self, request: Request) -> None:
        if self._recorder is not None:
            self._recorder.answer(request)
        elif request.kind is RequestKind.STOP:
            step = self._progress.step
            self._context.strategy.gather(None)  # no rank leaves while another still asks where they all stop
            raise StopRequested(f"asked to stop, after step {step}; no snapshots are taken in this fit")
