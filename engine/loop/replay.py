"""A replay of a loop: follows a plan up to one step, and ends the script there."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstride.engine.checkpointing.step_trace import StepTrace
from midstride.engine.errors import ReplayEnd, UserError
from midstride.engine.loop.attempt import Attempt
from midstride.engine.session.replay_plan import RESULT, TRACE, ReplayPlan

__all__ = ["LoopReplay"]

#: columns that hold no logged value
_COUNTS = ("epoch", "step")


@dataclass
class LoopReplay:
    """Receives the phases of a loop's steps, as a plan of faults does.

    Args:
        plan: what to do.
        attempt: returns the running attempt; None before it has begun.
    """

    plan: ReplayPlan
    attempt: Callable[[], Attempt | None]
    _trace: StepTrace | None = None

    def __post_init__(self) -> None:
        """Refuse what needs the module of a Trainer."""
        if self.plan.probe or self.plan.debug or self.plan.anomaly:
            raise UserError(
                f"a script computes its own steps: replay step {self.plan.until} without --probe, --pdb and --anomaly"
            )

    def at(self, rank: int, step: int, phase: str, *given: object) -> None:
        """Act at a batch, and at the end of a step."""
        attempt = self.attempt()
        if attempt is None:
            return
        if self.plan.trace:
            self._note(attempt, phase, step, *given)
        if phase != "after_step":
            return
        if step in self.plan.snapshots_at:
            attempt.checkpointer.take()
        if step >= self.plan.until:
            self._end(attempt)

    def _note(self, attempt: Attempt, phase: str, step: int, *given: object) -> None:
        """Note digests: of the batch before a step, then of what the step has logged and changed."""
        self._trace = trace = self._trace or attempt.trace()
        if phase == "batch":
            trace.note_batch(step + 1, attempt.progress.batch, *given)
        elif phase == "after_step":
            newest = attempt.context.metric_logger.rows.newest
            trace.note_losses(step, {name: value for name, value in newest.items() if name not in _COUNTS})
            trace.note_gradients(step)
            trace.note_state(step)

    def _end(self, attempt: Attempt) -> None:
        """Write the result, and end the script on all ranks.

        Raises:
            ReplayEnd: always.
        """
        context, rows = attempt.context, ""
        if self.plan.snapshots_at:
            attempt.checkpointer.run.flush()
        else:  # else the rows are in the snapshots
            context.metric_logger.rows.close()
            rows = context.metric_logger.drain_rows()
        if context.world.is_first:
            progress = context.progress
            page: dict[str, Any] = {"step": progress.step, "epoch": progress.epoch, "batch": progress.batch - 1}
            page |= {"samples": [], "learning_rates": {}, "logged": _logged(rows)}
            Path(self.plan.folder, RESULT).write_text(json.dumps({"rows": rows, "page": page}))
        if self._trace is not None:
            place = Path(self.plan.folder, TRACE.format(rank=context.world.rank))
            place.write_text(json.dumps(self._trace.steps))
        context.collective.gather(None)  # no rank ends while another still exchanges
        raise ReplayEnd(f"replayed up to step {self.plan.until}")


def _logged(rows: str) -> dict[str, float]:
    """Return the values of the last of `rows`, which the ranks have reduced."""
    last = [*csv.DictReader(io.StringIO(rows))][-1:]
    return {name: float(value) for row in last for name, value in row.items() if value and name not in _COUNTS}
