"""Boundaries: what is done between two batches, where everything that decides what comes next stands in the parts."""

from typing import TYPE_CHECKING, Any

from midstride.engine.errors import StopRequested
from midstride.engine.session.signals import Asked, Request

if TYPE_CHECKING:
    from midstride.engine.training.trainer import Trainer

__all__ = ["Boundaries"]


class Boundaries:
    """The places of one fit at which a snapshot can be taken, and what was asked from outside is done.

    Args:
        trainer: whose parts stand there; it knows by now whether the fit is kept.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer, self._recorder = trainer, trainer.recorder
        self._progress, self._rows = trainer.progress, trainer.logged.rows
        self._heartbeat, self._requests, self._reporter = trainer.heartbeat, trainer.requests, trainer.reporter
        self._mark_step = trainer.strategy.mark_step

    def stepped(self, batches: int | None, outputs: Any) -> None:
        """Close a step: its row, its event, and a snapshot if one is due.

        Args:
            batches: of the epoch, as far as is known.
            outputs: of the training step.
        """
        self._rows.step(self._progress.epoch, self._progress.step)
        self._reporter.step(self._progress, batches, outputs)
        self._trainer.strike("after_step")
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
            self._progress.after += 1  # a place of its own
            self._answer(request)

    def _answer(self, request: Request) -> None:
        if self._recorder is not None:
            self._recorder.answer(request)
        elif request.asked is Asked.STOP:
            step = self._progress.step
            self._trainer.strategy.gather(None)  # no rank leaves while another still asks where they all stop
            raise StopRequested(f"asked to stop, after step {step}; no snapshots are taken in this fit")
